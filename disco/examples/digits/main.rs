//! Trains a classifier of handwritten digits on several workers at once: each computes a gradient
//! from its share of the images, and allreduce averages them.
//!
//! The program is written once, in `model.rs`; `place.rs` says where the workers run, of which it
//! knows nothing. `rpc-server`, which stands above this crate, is a development dependency for the
//! places that it offers.

mod killer;
#[allow(unreachable_pub, reason = "tests use the file as part of a library")]
mod model;
#[allow(unreachable_pub, reason = "tests use the file as part of a library")]
mod on_opencl;
mod place;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use comfy_table::{CellAlignment, Table};
use disco::{OnLoss, Options};
use indicatif::{ProgressBar, ProgressStyle};
use killer::Killer;
use model::{CLASSES, Checkpoint, Digits, EPOCHS, Score};
use place::{Place, PlaceArgs, Role};
use rpc_core::blocking::block_on;
use rpc_core::{Registry, VirtualDevice};
use rpc_server::isolate::{self, gpu};
use rpc_server::server::exit_code;

/// The least share of the test images that must be told right.
const WANTED: f64 = 0.93;

/// Trains a classifier of handwritten digits on several workers.
#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Args {
    #[command(flatten)]
    place: PlaceArgs,
    /// Device of the workers that has the tensors, such as opencl; the processor if it is not given
    #[arg(long)]
    device: Option<VirtualDevice>,
    /// Print the mean loss of each epoch, one a line
    #[arg(long)]
    losses: bool,
    /// Kill workers after epochs that this seed chooses, replace each by another process, and go on
    /// from the last epoch; only over processes
    #[arg(long, value_name = "SEED")]
    kill_workers: Option<u64>,
    #[command(subcommand)]
    role: Option<Role>,
}

fn main() -> ExitCode {
    gpu::answer_if_asked();
    let registry = Registry::new();
    model::register(&registry);
    on_opencl::register(&registry).expect("the functions of the model are registered");
    isolate::run_if_isolated_with(&registry, || gpu::devices(&registry));
    disco::serve_if_worker_with(&registry, || gpu::devices(&registry));

    let args = Args::parse();
    match args.role {
        Some(role) => role.run(registry),
        None => match run(args, registry) {
            Ok(score) if score.accuracy() >= WANTED => ExitCode::SUCCESS,
            Ok(_) => {
                eprintln!("error: the accuracy is below {WANTED}");
                ExitCode::FAILURE
            }
            Err(error) => {
                exit_code::report(&*error);
                ExitCode::FAILURE
            }
        },
    }
}

fn run(args: Args, registry: Registry) -> Result<Score, Box<dyn std::error::Error>> {
    let mut options = Options::default();
    if args.kill_workers.is_some() {
        if !args.place.is_over_processes() {
            return Err("workers are killed only over processes of this program".into());
        }
        options.on_loss = OnLoss::AwaitReplacement;
    }
    let place = Place::open_with(args.place, registry, &[], options)?;
    let session = &place.session;
    let mut killer = args.kill_workers.map(|seed| Killer::new(seed, session)).transpose()?;

    let digits = Digits::load()?;
    let (train, total) = (digits.train_len(), digits.classes.len());
    eprintln!("training on {train} of {total} images, shared out among {} workers", session.num_workers());
    // It shows itself only on a terminal.
    let bar =
        ProgressBar::new(EPOCHS as u64).with_style(ProgressStyle::with_template("{bar:40} epoch {pos}/{len}  {msg}")?);
    let mut losses = Vec::new();
    let mut checkpoint = Checkpoint::default();
    let score = loop {
        let progress = |epoch, loss| {
            losses.push(loss);
            bar.set_message(format!("loss {loss:.4}"));
            bar.set_position(epoch as u64);
            killer.iter_mut().for_each(|killer| killer.end_epoch(epoch));
        };
        let device = args.device.clone();
        match block_on(model::train(&mut checkpoint, session, &digits, EPOCHS, device, progress))? {
            Ok(score) => break score,
            Err(error) => match &mut killer {
                Some(killer) if !error.lost_workers().is_empty() => killer.recover(session)?,
                _ => return Err(error.into()),
            },
        }
    };
    bar.finish_and_clear();
    session.shutdown().wait()?;

    let mut stdout = io::stdout().lock();
    if args.losses {
        losses.iter().try_for_each(|loss| writeln!(stdout, "{loss:.9}"))?;
    }
    writeln!(stdout, "test accuracy: {:.4} on the last {} images", score.accuracy(), total - train)?;
    writeln!(stdout, "{}", confusion(&score))?;
    Ok(score)
}

fn confusion(score: &Score) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_BORDERS_ONLY_CONDENSED);
    let header = std::iter::once("is \\ seen as".to_owned()).chain((0..CLASSES).map(|class| class.to_string()));
    table.set_header(header);
    for (class, row) in score.confusion.iter().enumerate() {
        let counts = row.iter().map(|count| if *count == 0 { String::new() } else { count.to_string() });
        table.add_row(std::iter::once(class.to_string()).chain(counts));
    }
    table.column_iter_mut().for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}
