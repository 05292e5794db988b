//! A perceptron with two layers, spread over several workers: each has some of the hidden units,
//! and allreduce adds up what they contribute.
//!
//! The kernels are a native module, compiled from C by `build.rs` when the program starts; the
//! workers load it. It needs a C compiler and TVM-FFI (`pip install apache-tvm-ffi`). `rpc-server`,
//! which stands above this crate, is a development dependency: its sessions load the module.

mod build;
#[path = "../digits/place.rs"]
mod place;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use clap::Parser;
use disco::{DRef, DiscoSession, ReduceOp, Scope};
use place::{Place, PlaceArgs, Role};
use rpc_core::{DataType, Registry, Tensor};
use rpc_server::isolate;
use rpc_server::server::exit_code;
use rpc_tvm::TvmFfi;

/// Rows of a batch, inputs, hidden units, outputs.
const BATCH: usize = 32;
const INPUTS: usize = 256;
const HIDDEN: usize = 1024;
const OUTPUTS: usize = 64;

const STEPS: u32 = 50;

/// Largest error of sums in another order, relative to the largest output.
const TOLERANCE: f32 = 1e-5;

/// Runs a perceptron whose hidden units are spread over several workers, with kernels that are
/// compiled from C.
#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Args {
    #[command(flatten)]
    place: PlaceArgs,
    #[command(subcommand)]
    role: Option<Role>,
}

type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    // Sessions of servers load what their operators allow; see `rpc-server serve --allow-modules`.
    let registry = Registry::new();
    isolate::run_if_isolated(&registry);
    let own = Registry::new();
    // The workers of this program itself load whatever it tells them to.
    own.add_loader(Arc::new(TvmFfi::default()));
    disco::serve_if_worker(&own);

    let args = Args::parse();
    if let Some(role) = args.role {
        return role.run(registry);
    }
    match run(args.place, own) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            exit_code::report(&*error);
            ExitCode::FAILURE
        }
    }
}

fn run(place: PlaceArgs, registry: Registry) -> Result<(), Failure> {
    let folder = tempfile::tempdir()?;
    let module = build::kernels(folder.path())?;
    let on_servers = place.is_on_servers();
    let place = Place::open(place, registry, &["--allow-modules"])?;
    let session = &place.session;
    let path = match module.to_str() {
        Some(path) if !on_servers => path.to_owned(),
        _ => session.upload_module(module).wait()?,
    };
    let kernels = session.load_module(&path, None)?;
    let (matmul, relu) = (kernels.function("matmul")?, kernels.function("relu")?);

    let workers = session.num_workers() as usize;
    if !HIDDEN.is_multiple_of(workers) {
        return Err(format!("{HIDDEN} hidden units cannot be spread over {workers} workers").into());
    }
    let part = HIDDEN / workers;
    let (x, first, second) = (random(1, BATCH * INPUTS), random(2, INPUTS * HIDDEN), random(3, HIDDEN * OUTPUTS));

    // Each worker has some columns of the first layer's weights, and the same rows of the second
    // one's.
    let columns: Vec<f32> = (0..workers)
        .flat_map(|worker| first.chunks(HIDDEN).flat_map(move |row| &row[worker * part..][..part]))
        .copied()
        .collect();
    let scatter = |elements: &[f32], shape: [usize; 3]| -> Result<DRef, Failure> {
        Ok(session.scatter(&tensor(elements, &shape)?, None, Scope::World)?)
    };
    let first_part = scatter(&columns, [workers, INPUTS, part])?;
    let second_part = scatter(&second, [workers, part, OUTPUTS])?;
    let batch = session.broadcast(&tensor(&x, &[BATCH, INPUTS])?, None, Scope::World)?;
    let hidden = session.empty(&[BATCH as i64, part as i64], DataType::F32, None)?;
    let output = session.empty(&[BATCH as i64, OUTPUTS as i64], DataType::F32, None)?;
    session.sync_all().wait()?;

    let began = Instant::now();
    for _ in 0..STEPS {
        matmul.call((&batch, &first_part, &hidden))?;
        relu.call((&hidden,))?;
        matmul.call((&hidden, &second_part, &output))?;
        session.allreduce(&output, Some(&output), ReduceOp::Sum, Scope::World)?;
    }
    session.sync_all().wait()?;
    let took = began.elapsed() / STEPS;
    println!("{BATCH} x {INPUTS} -> {HIDDEN} -> {OUTPUTS} over {workers} workers: {took:.1?} a step");
    check(session, &output, &expected(&x, &first, &second))?;
    session.shutdown().wait()?;
    Ok(())
}

/// Compares the output of worker 0 with what this process has computed alone.
fn check(session: &DiscoSession, output: &DRef, expected: &[f32]) -> Result<(), Failure> {
    let output = session.copy_from_worker_0(output).wait()?;
    let output = output.read()?;
    let output = output.as_slice::<f32>()?;
    let largest = expected.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()));
    let off = output.iter().zip(expected).fold(0.0, |off: f32, (a, b)| off.max((a - b).abs())) / largest;
    println!("off by at most {off:.1e} of the largest output");
    if off.is_nan() || off > TOLERANCE {
        return Err(format!("the output differs by {off:e}, more than {TOLERANCE:e}").into());
    }
    Ok(())
}

/// Returns the output, computed without workers and without kernels.
fn expected(x: &[f32], first: &[f32], second: &[f32]) -> Vec<f32> {
    let product = |x: &[f32], w: &[f32], inner: usize, columns: usize| {
        let mut y = vec![0.0_f32; BATCH * columns];
        for (y, x) in y.chunks_mut(columns).zip(x.chunks(inner)) {
            for (x, w) in x.iter().zip(w.chunks(columns)) {
                y.iter_mut().zip(w).for_each(|(y, w)| *y += x * w);
            }
        }
        y
    };
    let mut hidden = product(x, first, INPUTS, HIDDEN);
    hidden.iter_mut().for_each(|value| *value = value.max(0.0));
    product(&hidden, second, HIDDEN, OUTPUTS)
}

fn tensor(elements: &[f32], shape: &[usize]) -> Result<Tensor, Failure> {
    let shape: Vec<_> = shape.iter().map(|length| *length as i64).collect();
    Ok(Tensor::from_slice(shape, elements)?)
}

/// Numbers from -1 to 1, the same for the same seed (xorshift).
fn random(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1_u32 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(count).collect()
}
