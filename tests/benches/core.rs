//! The codec and the handle table, on their own: `cargo bench -p rpc-tests --bench core`.
#![allow(missing_docs, reason = "criterion's macros make undocumented items")]

use std::hint::black_box;
use std::time::Instant;

use bytes::Bytes;
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use rpc_core::proto::{decode_request, decode_value, encode_request, encode_value};
use rpc_core::{DataType, Device, Handle, HandleTable, Lane, Operation, Request, TensorRef, Value};

fn call() -> Request {
    let tensor = TensorRef {
        storage: Handle::from_bits(0x0123_4567_89ab_cdef),
        byte_offset: 0,
        shape: vec![64, 1024],
        strides: None,
        dtype: DataType::F32,
        device: Device::cpu(),
    };
    let args = vec![Value::Int(42), Value::Float(0.5), Value::Str("relu".into()), tensor.into()];
    Request::new(Operation::Call { function: Handle::from_bits(0xfedc_ba98_7654_3210), args })
}

fn codec(criterion: &mut Criterion) {
    let now = Instant::now();
    let request = call();
    let (body, _) = encode_request(&request, now);
    let mut group = criterion.benchmark_group("codec");
    group.throughput(Throughput::Elements(1));
    group.bench_function("encode_call_4_args", |bencher| bencher.iter(|| encode_request(black_box(&request), now)));
    group.bench_function("decode_call_4_args", |bencher| {
        bencher.iter(|| decode_request(Lane::DEFAULT, black_box(&body), Bytes::new(), now));
    });
    let list = Value::List((0..1000).map(Value::Int).collect());
    let (list_body, _) = encode_value(&list);
    group.throughput(Throughput::Elements(1000));
    group.bench_function("encode_list_1000_ints", |bencher| bencher.iter(|| encode_value(black_box(&list))));
    group.bench_function("decode_list_1000_ints", |bencher| {
        bencher.iter(|| decode_value(black_box(&list_body), Bytes::new()));
    });
    let payload = Value::Bytes(Bytes::from(vec![7; 1 << 20]));
    group.throughput(Throughput::Bytes(1 << 20));
    group
        .bench_function("encode_bytes_1MiB_by_reference", |bencher| bencher.iter(|| encode_value(black_box(&payload))));
    group.finish();
}

fn handles(criterion: &mut Criterion) {
    const LIVE: usize = 10_000;
    let mut table = HandleTable::new(1, 1 << 20);
    let live: Vec<_> = (0..LIVE).filter_map(|object| table.insert(object).ok()).collect();
    let mut group = criterion.benchmark_group("handle_table");
    group.throughput(Throughput::Elements(1));
    let mut at = 0;
    group.bench_function("get_among_10000", |bencher| {
        bencher.iter(|| {
            at = (at + 7919) % LIVE;
            table.get(black_box(live[at])).copied().ok()
        });
    });
    group.bench_function("refuse_forged", |bencher| {
        bencher.iter(|| table.get(black_box(Handle::from_bits(0x5555_5555_5555_5555))).is_err());
    });
    group.bench_function("insert_and_remove", |bencher| {
        bencher.iter(|| table.insert(0).and_then(|handle| table.remove(black_box(handle))).ok());
    });
    group.bench_function("drain_1000", |bencher| {
        let full = || {
            let mut table = HandleTable::new(1, 1 << 20);
            (0..1000).for_each(|object| drop(table.insert(object)));
            table
        };
        bencher.iter_batched(full, |mut table| table.drain(), BatchSize::SmallInput);
    });
    group.finish();
}

criterion_group!(benches, codec, handles);
criterion_main!(benches);
