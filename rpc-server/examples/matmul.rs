//! Multiplies two matrices on a GPU, by cuBLAS, and compares with the processor:
//!
//! ```sh
//! cargo run --release -p rpc-server --example matmul -- [--size N] [ADDRESS]
//! ```
//!
//! The GPU is that of the server at the address, or of this machine without one. Where there is
//! none it says why, and ends in good order.

use std::error::Error;
use std::time::Instant;

use clap::Parser;
use rpc_core::{DataType, Device, ErrorKind, LocalSession, Registry, RemoteTensor, Session};
use rpc_server::isolate::gpu;
use rpc_transports::Connector;

/// Multiplies two matrices on a GPU.
#[derive(Parser)]
struct Args {
    /// A server, such as tcp://board.lan:9090; without it this machine.
    address: Option<String>,
    /// Rows and columns of the matrices.
    #[arg(long, default_value_t = 512)]
    size: usize,
}

/// Number of timed products.
const TIMES: u32 = 10;

fn main() -> Result<(), Box<dyn Error>> {
    let Args { address, size } = Args::parse();
    let session = match &address {
        Some(address) => Connector::new().connect_blocking(address)?,
        None => {
            let registry = Registry::new();
            let devices = gpu::devices(&registry);
            Session::new(LocalSession::builder(registry).devices(devices).build())
        }
    };
    let a: Vec<f32> = (0..size * size).map(|at| (at % 7) as f32 - 3.0).collect();
    let b: Vec<f32> = (0..size * size).map(|at| (at % 5) as f32 * 0.5).collect();
    let on_gpu = match upload(&session, &a, size) {
        Err(error) if error.kind() == ErrorKind::DeviceUnavailable => {
            println!("nothing is multiplied: {}", error.message());
            return Ok(());
        }
        uploaded => uploaded?,
    };
    let (b_on_gpu, product) = (upload(&session, &b, size)?, upload(&session, &vec![0.0; size * size], size)?);
    let matmul = session.get_function("cuda.matmul").wait()?;
    let multiply = || matmul.call::<()>((&on_gpu, &b_on_gpu, &product)).wait();
    // The first one loads cuBLAS.
    multiply()?;
    session.stream_wait(Device::cuda(0), None).wait()?;
    let began = Instant::now();
    for _ in 0..TIMES {
        multiply()?;
    }
    session.stream_wait(Device::cuda(0), None).wait()?;
    let took = began.elapsed() / TIMES;
    let bytes = session.copy_from_remote(&product).wait()?;
    let found: Vec<f32> = rpc_core::dlpack::from_bytes(&bytes);
    let error = rows(size).map(|row| worst(&a, &b, &found, size, row)).fold(0.0, f32::max);
    let rate = 2.0 * (size as f64).powi(3) / took.as_secs_f64() / 1e9;
    println!("{size} x {size} in {took:.1?}, {rate:.1} GFLOP/s; differs from the processor's by {error} at most");
    // These numbers are small multiples of a half, whose sums are exact.
    if error > 0.0 { Err("the products differ".into()) } else { Ok(()) }
}

fn upload(session: &Session, values: &[f32], size: usize) -> rpc_core::Result<RemoteTensor> {
    let side = i64::try_from(size).unwrap_or(i64::MAX);
    let tensor = session.alloc(Device::cuda(0), DataType::F32, &[side, side]).wait()?;
    session.copy_to_remote(&tensor, rpc_core::dlpack::to_bytes(values)).wait()?;
    Ok(tensor)
}

/// The rows that are compared: the processor takes its time.
fn rows(size: usize) -> impl Iterator<Item = usize> {
    (0..size).step_by((size / 16).max(1))
}

/// By how much an element of a row differs from the processor's, at most.
fn worst(a: &[f32], b: &[f32], found: &[f32], size: usize, row: usize) -> f32 {
    let mut expected = vec![0.0_f32; size];
    for (k, factor) in a[row * size..][..size].iter().enumerate() {
        for (sum, value) in expected.iter_mut().zip(&b[k * size..][..size]) {
            *sum += factor * value;
        }
    }
    expected.iter().zip(&found[row * size..]).map(|(expected, found)| (expected - found).abs()).fold(0.0, f32::max)
}
