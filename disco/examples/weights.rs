//! Loads the weights of a model to several workers, whole and in parts, and checks that the parts
//! make the whole.
//!
//! Without arguments it writes a small model in two files into a temporary folder, and starts four
//! worker processes. Given the path of another one (a `.safetensors` file, an index, or a folder)
//! it loads that. `rpc-server`, which stands above this crate, is a development dependency for the
//! places that it offers.

#[path = "digits/model_folder.rs"]
mod model_folder;
#[path = "digits/place.rs"]
mod place;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use disco::{DRef, DiscoSession, Part, ReduceOp, Scope, ShardLoader, TensorInfo};
use indicatif::{BinaryBytes, ProgressBar, ProgressStyle};
use model_folder::ModelFolder;
use place::{Place, PlaceArgs, Role};
use rpc_core::{DataType, Registry, Result, TensorView, TensorViewMut};
use rpc_server::isolate;
use rpc_server::server::exit_code;
use safetensors::tensor::{Dtype, TensorView as Written, serialize_to_file};

/// Loads the weights of a model to several workers.
#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Args {
    /// The model: a .safetensors file, a .safetensors.index.json, or a folder with one. Without it
    /// a small one is made. Servers that were started elsewhere read it themselves if they were
    /// given its folder with --weights
    model: Option<PathBuf>,
    #[command(flatten)]
    place: PlaceArgs,
    /// Show a bar of the bytes that have come to all workers
    #[arg(long)]
    progress: bool,
    #[command(subcommand)]
    role: Option<Role>,
}

type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let registry = Registry::new();
    registry.add("weights.add_bytes", add_bytes);
    isolate::run_if_isolated(&registry);
    disco::serve_if_worker(&registry);

    let args = Args::parse();
    if let Some(role) = args.role {
        return role.run(registry);
    }
    match run(args, registry) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            exit_code::report(&*error);
            ExitCode::FAILURE
        }
    }
}

/// The workers' part: adds the bytes of a tensor to `sum`, whatever its elements are.
fn add_bytes(mut sum: TensorViewMut, weight: TensorView) -> Result<()> {
    let bytes: i64 = weight.bytes()?.iter().map(|byte| i64::from(*byte)).sum();
    sum.as_mut_slice::<i64>()?.iter_mut().for_each(|sum| *sum += bytes);
    Ok(())
}

fn run(args: Args, registry: Registry) -> Result<(), Failure> {
    let (model, _temporary) = match args.model {
        Some(model) => (model, None),
        None => {
            let temporary = ModelFolder::create_in(&std::env::temp_dir())?;
            (write_model(temporary.path())?, Some(temporary))
        }
    };
    let folder = if model.is_dir() { &model } else { model.parent().unwrap_or(Path::new(".")) };
    let folder = folder.canonicalize()?;
    let folder = folder.to_str().ok_or("the folder of the model has no name in UTF-8")?;
    let place = Place::open(args.place, registry, &["--weights", folder])?;
    let session = &place.session;
    let workers = session.num_workers();

    let bar = if args.progress { ProgressBar::new(0) } else { ProgressBar::hidden() };
    let bar = bar.with_style(ProgressStyle::with_template(
        "{bar:40} {binary_bytes}/{binary_total_bytes}  {binary_bytes_per_sec}",
    )?);
    let loader = ShardLoader::open(session, &model).wait()?.progress({
        let bar = bar.clone();
        move |done, total| {
            bar.set_length(total);
            bar.set_position(done);
        }
    });
    for one in loader.unreadable() {
        eprintln!("worker {} gets what is in {} from others: {}", one.worker, one.file.display(), one.reason);
    }
    // Whatever divides, by its first dimension that does.
    let divides = |info: &TensorInfo| info.shape.iter().position(|length| length % i64::from(workers) == 0);
    let tensors: Vec<_> = loader.tensors().filter(|(_, info)| divides(info).is_some()).collect();
    let bytes: u64 = tensors.iter().map(|(_, info)| info.size_bytes).sum();
    let (count, all) = (tensors.len(), loader.tensors().count());
    println!("{count} of {all} tensors divide among {workers} workers: {}", BinaryBytes(bytes));

    let began = Instant::now();
    let parts = loader.load_all(|_, info| divides(info).map(Part::shard), None)?;
    session.sync_all().wait()?;
    let of_parts = sum(session, parts.values(), ReduceOp::Sum)?;
    bar.suspend(|| report("a part on each worker", bytes, began.elapsed()));
    drop(parts);

    let began = Instant::now();
    let whole = loader.load_all(|_, info| divides(info).map(|_| Part::Whole), None)?;
    session.sync_all().wait()?;
    bar.suspend(|| report("all of it on each worker", bytes * u64::from(workers), began.elapsed()));
    let (least, most) = (sum(session, whole.values(), ReduceOp::Min)?, sum(session, whole.values(), ReduceOp::Max)?);
    bar.finish_and_clear();
    session.shutdown().wait()?;

    println!("sum of the bytes: {of_parts} in parts, {most} as a whole");
    if [least, most] != [of_parts; 2] {
        return Err("the sums are not the same".into());
    }
    Ok(())
}

fn report(what: &str, bytes: u64, took: Duration) {
    println!("{what:<25} {:>12} in {took:.3?}", BinaryBytes(bytes).to_string());
}

/// The sum of the bytes of these tensors, by worker, reduced among the workers.
fn sum<'a>(session: &DiscoSession, tensors: impl Iterator<Item = &'a DRef>, op: ReduceOp) -> disco::Result<i64> {
    let sum = session.empty(&[1], DataType::I64, None)?;
    let add = session.get_global_func("weights.add_bytes")?;
    for tensor in tensors {
        add.call((&sum, tensor))?;
    }
    session.allreduce(&sum, Some(&sum), op, Scope::World)?;
    let sum = session.copy_from_worker_0(&sum).wait()?;
    session.sync_all().wait()?;
    Ok(sum.read()?.as_slice::<i64>()?[0])
}

/// Writes a model of eight layers in two files, and an index. The index's path.
fn write_model(folder: &Path) -> Result<PathBuf, Failure> {
    const SHAPES: [(&str, &[usize]); 3] = [("weight", &[480, 960]), ("up", &[960, 240]), ("bias", &[480])];
    let mut places = Vec::new();
    for half in 0..2 {
        let file = format!("model-0000{}-of-00002.safetensors", half + 1);
        let mut data = Vec::new();
        for layer in half * 4..half * 4 + 4 {
            for (name, shape) in SHAPES {
                let name = format!("layers.{layer}.{name}");
                places.push(format!("\"{name}\": \"{file}\""));
                let elements = (0..shape.iter().product::<usize>()).map(|at| ((at * 31 + layer) % 251) as f32);
                data.push((name, shape.to_vec(), elements.flat_map(f32::to_le_bytes).collect::<Vec<u8>>()));
            }
        }
        let tensors =
            data.iter().map(|(name, shape, bytes)| Ok((name, Written::new(Dtype::F32, shape.clone(), bytes)?)));
        let tensors = tensors.collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
        serialize_to_file(tensors, None, &folder.join(file))?;
    }
    let index = folder.join("model.safetensors.index.json");
    std::fs::write(&index, format!("{{\"metadata\": {{}}, \"weight_map\": {{{}}}}}", places.join(", ")))?;
    Ok(index)
}
