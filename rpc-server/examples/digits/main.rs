//! Trains a classifier of handwritten digits on a server, by calling functions there over tensors that stay there.
//!
//! Without an argument the server is this program, started again as a child process on a free port: this is how a program
//! embeds a server with functions of its own. The steps are in `model.rs`.

mod model;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use comfy_table::{CellAlignment, Table};
use indicatif::{ProgressBar, ProgressStyle};
use model::{CLASSES, Digits, EPOCHS, Score};
use rpc_core::Registry;
use rpc_core::blocking::block_on;
use rpc_server::config::ServeConfig;
use rpc_server::{RpcServer, ServerProcess, exit, run_as_child_if_asked};
use rpc_transports::{Address, Connector};

/// The least share of the test images that must be told right.
const WANTED: f64 = 0.93;

/// Trains a classifier of handwritten digits on a server. Without an argument it starts one of its own.
#[derive(Parser)]
struct Args {
    /// Use the server there, which "digits --serve" has started
    #[arg(long, value_name = "ADDRESS", conflicts_with = "serve")]
    connect: Option<String>,
    /// Be that server
    #[arg(long, value_name = "ADDRESS")]
    serve: Option<Address>,
}

fn main() -> ExitCode {
    let registry = Registry::new();
    model::register(&registry);
    run_as_child_if_asked(&registry);

    let args = Args::parse();
    if let Some(address) = args.serve {
        let config = ServeConfig { listen: vec![address.into()], ..ServeConfig::default() };
        return exit::of_server(&RpcServer::builder().registry(registry).config(config).build().run_blocking()).into();
    }
    match run(args.connect) {
        Ok(score) if score.accuracy() >= WANTED => ExitCode::SUCCESS,
        Ok(_) => {
            eprintln!("error: the accuracy is below {WANTED}");
            ExitCode::FAILURE
        }
        Err(error) => {
            exit::report(&*error);
            ExitCode::FAILURE
        }
    }
}

fn run(connect: Option<String>) -> Result<Score, Box<dyn std::error::Error>> {
    // Ends with this function.
    let own = if connect.is_none() { Some(ServerProcess::spawn_self()?) } else { None };
    let address = connect.as_deref().or(own.as_ref().map(ServerProcess::address)).unwrap_or_default();
    let session = Connector::new().connect_blocking(address)?;

    let digits = Digits::load()?;
    let (train, total) = (digits.train_len(), digits.classes.len());
    eprintln!("training on {train} of {total} images, at {address}");
    // It shows itself only on a terminal.
    let bar =
        ProgressBar::new(EPOCHS as u64).with_style(ProgressStyle::with_template("{bar:40} epoch {pos}/{len}  {msg}")?);
    let score = block_on(model::train(&session, &digits, |epoch, loss| {
        bar.set_message(format!("loss {loss:.4}"));
        bar.set_position(epoch as u64);
    }))??;
    bar.finish_and_clear();

    let mut stdout = io::stdout().lock();
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
