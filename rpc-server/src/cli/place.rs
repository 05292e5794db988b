//! `place`: plans a graph of calls over several servers from a file, and runs it.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use clap::Args;
use rpc_core::client::SendRoute;
use rpc_core::placement::{Argument, CallGraph, CallId, Constraint, CopyReport, Edge, InputData, Plan, Site, ValueId};
use rpc_core::{DataType, RpcError, Session, Value, VirtualDevice};
use serde::Deserialize;
use serde_json::json;

use super::connect::{CommonOptions, Files};
use super::failure::Failure;
use super::new_file::NewFile;
use super::npy::{NpyError, NpyHeader, read_header, write_header};
use super::output::{Output, counted};
use crate::config::SERVER_PORT;

/// Largest file with a graph, in bytes.
const MAX_GRAPH: u64 = 1 << 20;

const HELP: &str = "\
The file is TOML, and paths in it are relative to its folder:

  [[session]]                   # servers, the preferred one first
  name = \"board\"
  address = \"tcp://board:9090\"

  [[input]]
  name = \"x\"
  file = \"x.npy\"
  session = \"board\"             # optional, as 'on' is: where it lies
  on = \"cpu,scope=host\"

  [[call]]
  name = \"y\"                    # its results are y, or y.0, y.1 …
  function = \"scale\"            # takes the arguments, and then its results to write to
  args = [\"x\", 2.5, { text = \"fast\" }]
  results = [{ dtype = \"float32\", shape = [2, 3] }]
  on = \"cuda,target=cuda -arch=sm_90\"

  [[output]]
  of = \"y\"
  file = \"y.npy\"

  [default]                     # optional: where everything else lies
  session = \"board\"";

#[derive(Args, Debug)]
#[command(after_long_help = HELP)]
pub(super) struct PlaceArgs {
    /// The file with the graph
    graph: PathBuf,
    /// Only print the plan: where each call runs, and what is copied
    #[arg(long, env = "RPC_CLI_PLAN")]
    plan: bool,
}

/// The file with a graph.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct GraphFile {
    session: Vec<SessionEntry>,
    #[serde(default)]
    input: Vec<InputEntry>,
    #[serde(default)]
    call: Vec<CallEntry>,
    #[serde(default)]
    output: Vec<OutputEntry>,
    default: Option<DefaultEntry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SessionEntry {
    name: String,
    address: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct InputEntry {
    name: String,
    file: PathBuf,
    session: Option<String>,
    on: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CallEntry {
    name: String,
    function: String,
    #[serde(default)]
    args: Vec<ArgEntry>,
    #[serde(default)]
    results: Vec<ResultEntry>,
    session: Option<String>,
    on: Option<String>,
}

/// Argument of a call. A text alone names a tensor.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum ArgEntry {
    Tensor(String),
    Bool(bool),
    Int(i64),
    Float(f64),
    Text { text: String },
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ResultEntry {
    dtype: String,
    shape: Vec<i64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct OutputEntry {
    of: String,
    file: PathBuf,
    session: Option<String>,
    on: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DefaultEntry {
    session: Option<String>,
    on: Option<String>,
}

pub(super) async fn place(options: &CommonOptions, output: &Output, args: PlaceArgs) -> Result<(), Failure> {
    let PlaceArgs { graph: path, plan: only_plan } = args;
    let folder = path.parent().map(Path::to_owned).unwrap_or_default();
    let file = read_graph(&path)?;
    let inputs =
        file.input.iter().map(|input| Input::open(&folder.join(&input.file))).collect::<Result<Vec<_>, _>>()?;
    let headers: Vec<_> = inputs.iter().map(|input| &input.header).collect();
    let graph = graph_of(&file, &headers).map_err(|problem| usage(&path, problem))?;
    let mut sessions = Vec::new();
    let mut sites = Vec::new();
    for SessionEntry { name, address } in &file.session {
        let (mut options, mut address) = (options.clone(), address.clone());
        options.resolve_servers(&mut address, SERVER_PORT)?;
        options.check_addresses(&address)?;
        let session = options.connect(&address, Files::None).await?;
        sites.push(Site::of(name, &session).await?);
        sessions.push((name.as_str(), session));
    }
    let plan = graph.plan(&sites).map_err(|error| RpcError::invalid_argument(error.to_string()))?;
    print(output, &plan, only_plan)?;
    if !only_plan {
        run(&plan, &sessions, &file, inputs, &folder, output).await?;
    }
    for (_, session) in sessions {
        session.shutdown().await?;
    }
    Ok(())
}

fn usage(path: &Path, problem: impl std::fmt::Display) -> Failure {
    Failure::Usage(format!("{}: {problem}", path.display()))
}

fn read_graph(path: &Path) -> Result<GraphFile, Failure> {
    let cannot = |error| Failure::file("cannot read", path, error);
    let mut text = String::new();
    let file = File::open(path).map_err(cannot)?;
    file.take(MAX_GRAPH + 1).read_to_string(&mut text).map_err(cannot)?;
    if text.len() as u64 > MAX_GRAPH {
        return Err(usage(path, format!("a graph of more than {MAX_GRAPH} bytes")));
    }
    toml::from_str(&text).map_err(|error| usage(path, error.to_string().trim_end()))
}

/// An input's file, whose header has been read.
struct Input {
    path: PathBuf,
    file: File,
    header: NpyHeader,
}

impl Input {
    fn open(path: &Path) -> Result<Self, Failure> {
        let cannot = |error| Failure::file("cannot read", path, error);
        let mut file = File::open(path).map_err(cannot)?;
        let header = read_header(&mut file).map_err(|source| npy(path, source))?;
        let expected = header.data_offset.saturating_add(header.data_len_bytes());
        // Checked before as many bytes are reserved.
        if fs::metadata(path).map_err(cannot)?.len() < expected {
            return Err(npy(path, NpyError::Truncated));
        }
        Ok(Self { path: path.to_owned(), file, header })
    }

    fn read(mut self) -> Result<InputData, Failure> {
        let mut bytes = vec![0; usize::try_from(self.header.data_len_bytes()).unwrap_or(usize::MAX)];
        self.file.read_exact(&mut bytes).map_err(|error| Failure::file("cannot read", &self.path, error))?;
        Ok(bytes.into())
    }
}

fn npy(path: &Path, source: NpyError) -> Failure {
    Failure::Npy { file: path.to_owned(), source }
}

/// Returns the graph of a file, whose inputs have these headers.
fn graph_of(file: &GraphFile, headers: &[&NpyHeader]) -> Result<CallGraph, String> {
    let mut graph = CallGraph::new();
    let mut names: Vec<(String, ValueId)> = Vec::new();
    let find = |names: &[(String, ValueId)], name: &str| {
        let found = names.iter().find(|(known, _)| known == name).map(|(_, value)| *value);
        found.ok_or_else(|| format!("there is no tensor '{name}' up to here"))
    };
    for (entry, header) in file.input.iter().zip(headers) {
        let input = graph.input(&entry.name, header.dtype, &header.shape);
        constrain(&mut graph, input, &entry.session, &entry.on)?;
        names.push((entry.name.clone(), input.into()));
    }
    for entry in &file.call {
        let argument = |arg: &ArgEntry| -> Result<Argument, String> {
            Ok(match arg {
                ArgEntry::Tensor(name) => find(&names, name)?.into(),
                ArgEntry::Bool(value) => Value::Bool(*value).into(),
                ArgEntry::Int(value) => Value::Int(*value).into(),
                ArgEntry::Float(value) => Value::Float(*value).into(),
                ArgEntry::Text { text } => Value::Str(text.clone()).into(),
            })
        };
        let arguments = entry.args.iter().map(argument).collect::<Result<Vec<_>, _>>()?;
        let dtype = |result: &ResultEntry| result.dtype.parse::<DataType>().map_err(|error| error.message().to_owned());
        let dtypes = entry.results.iter().map(dtype).collect::<Result<Vec<_>, _>>()?;
        let results: Vec<_> =
            dtypes.iter().zip(&entry.results).map(|(dtype, result)| (*dtype, &result.shape[..])).collect();
        let call = graph.call(&entry.function, arguments, &results);
        constrain(&mut graph, call, &entry.session, &entry.on)?;
        names.extend(names_of(&entry.name, call, results.len()));
    }
    for entry in &file.output {
        // A file is written once, so that it can be the output's name.
        let output = graph.output(&entry.file.to_string_lossy(), find(&names, &entry.of)?);
        constrain(&mut graph, output, &entry.session, &entry.on)?;
    }
    if let Some(DefaultEntry { session, on }) = &file.default {
        graph.default_location(constraint(session, on)?);
    }
    let mut seen = std::collections::BTreeSet::new();
    match names.iter().find(|(name, _)| !seen.insert(name)) {
        Some((name, _)) => Err(format!("two tensors are called '{name}'")),
        None => Ok(graph),
    }
}

/// Returns the names of a call's results.
fn names_of(name: &str, call: CallId, count: usize) -> Vec<(String, ValueId)> {
    let numbered = (0..count).map(|index| (format!("{name}.{index}"), call.result(index)));
    let alone = (count == 1).then(|| (name.to_owned(), call.result(0)));
    alone.into_iter().chain(numbered).collect()
}

fn constrain(
    graph: &mut CallGraph,
    edge: impl Into<Edge>,
    session: &Option<String>,
    on: &Option<String>,
) -> Result<(), String> {
    if session.is_some() || on.is_some() {
        graph.constrain(edge, constraint(session, on)?, "the file says so");
    }
    Ok(())
}

fn constraint(session: &Option<String>, on: &Option<String>) -> Result<Constraint, String> {
    let device: VirtualDevice = match on {
        Some(on) => on.parse().map_err(|error: RpcError| error.message().to_owned())?,
        None => VirtualDevice::unconstrained(),
    };
    let constraint = Constraint::from(device);
    Ok(match session {
        Some(session) => constraint.in_session(session),
        None => constraint,
    })
}

/// Prints the plan: as data if it is all that is asked for, and as a note otherwise.
fn print(output: &Output, plan: &Plan, is_data: bool) -> Result<(), Failure> {
    let text = plan.to_string();
    if !is_data {
        text.lines().for_each(|line| output.note(line));
        return Ok(());
    }
    if output.is_json() {
        return output.json(&json!({ "steps": text.lines().collect::<Vec<_>>(), "copies": plan.copies() }));
    }
    text.lines().try_for_each(|line| output.untrusted_line(line))
}

async fn run(
    plan: &Plan,
    sessions: &[(&str, Session)],
    file: &GraphFile,
    inputs: Vec<Input>,
    folder: &Path,
    output: &Output,
) -> Result<(), Failure> {
    let names = file.input.iter().map(|input| input.name.as_str());
    let inputs = names.zip(inputs).map(|(name, input)| Ok((name, input.read()?)));
    let report = plan.run_reported(sessions, inputs.collect::<Result<_, Failure>>()?).await?;
    let (outputs, copies) = (report.outputs, report.copies);
    copies.iter().for_each(|CopyReport { step, route, .. }| output.note(&format!("{step}: {route}")));
    for entry in &file.output {
        let (path, name) = (folder.join(&entry.file), entry.file.to_string_lossy());
        let Some(tensor) = outputs.get(&*name) else { continue };
        let bytes = tensor.session().copy_from_remote(tensor).await?;
        let new = NewFile::create(&path, output)?;
        let mut writer = new.writer()?;
        write_header(&mut writer, tensor.dtype(), tensor.shape()).map_err(|source| npy(&path, source))?;
        writer.write_all(&bytes).map_err(|error| Failure::file("cannot write", &path, error))?;
        new.persist()?;
    }
    output.note(&format!("{} written", counted(file.output.len() as u64, "file")));
    if output.is_json() {
        let files: Vec<_> = file.output.iter().map(|entry| entry.file.to_string_lossy()).collect();
        let copies: Vec<_> = copies.iter().map(copy_document).collect();
        output.json(&json!({ "copies": copies, "files": files }))?;
    }
    Ok(())
}

/// Returns a copy and its route as data.
fn copy_document(copy: &CopyReport) -> serde_json::Value {
    let (route, address, reason) = match &copy.route {
        SendRoute::Direct { address } => ("direct", Some(address), None),
        SendRoute::ThroughClient { reason } => ("client", None, Some(reason)),
        SendRoute::SameSession => ("session", None, None),
        _ => ("other", None, None),
    };
    json!({ "step": copy.step.to_string(), "route": route, "address": address, "reason": reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(text: &str) -> Result<CallGraph, String> {
        let file: GraphFile = toml::from_str(text).map_err(|error| error.to_string())?;
        let mut npy = Vec::new();
        write_header(&mut npy, DataType::F32, &[2]).unwrap();
        let header = read_header(&mut npy.as_slice()).unwrap();
        graph_of(&file, &vec![&header; file.input.len()])
    }

    #[test]
    fn a_graph_that_makes_no_sense_is_refused_in_words() {
        let session = "[[session]]\nname = 'a'\naddress = 'b'\n";
        for (rest, part) in [
            ("[[call]]\nname = 'y'\nfunction = 'f'\nargs = ['x']", "no tensor 'x' up to here"),
            ("[[input]]\nname = 'x'\nfile = 'x.npy'\non = 'gpu,what'", "gpu"),
            (
                "[[input]]\nname = 'x'\nfile = 'x.npy'\n[[input]]\nname = 'x'\nfile = 'y.npy'",
                "two tensors are called 'x'",
            ),
            ("[[output]]\nof = 'y'\nfile = 'y.npy'", "no tensor 'y'"),
            ("[[call]]\nname = 'y'\nfunction = 'f'\nresults = [{ dtype = 'much', shape = [] }]", "much"),
            ("[[call]]\nname = 'y'\nfunction = 'f'\nargs = [{ texts = 'x' }]", "did not match"),
            ("[[call]]\nfunction = 'f'", "missing field `name`"),
            ("[[inputs]]\nname = 'x'", "unknown field `inputs`"),
        ] {
            let problem = graph(&format!("{session}{rest}")).unwrap_err();
            assert!(problem.contains(part), "{rest}: {problem}");
        }
        graph(&format!("{session}[[input]]\nname = 'x'\nfile = 'x.npy'\non = 'cpu,scope=host'")).unwrap();
    }
}
