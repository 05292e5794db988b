//! [`ShardLoader`], the controller's side of loading: the tensors of the files, the workers that
//! can read each file, and the loads that they are to do.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rpc_core::{DataType, Pack, Packed, RpcError, Tensor, Value, VirtualDevice, blocking};

use super::Part;
use super::cached_parts::{AskedLimits, NodeCaches, digest_of_part, of_all};
use super::files::{InFile, Model, WeightFile};
use super::format::{Placed, TensorInfo};
use super::messages::{FindRequest, LoadRequest, RequestedFile};
use super::tensor_slice::TensorSlice;
use crate::completion::Completion;
use crate::controller::dref::{DPackedFunc, DRef};
use crate::controller::session::{Content, DiscoSession};
use crate::error::{DiscoError, Result, WorkerId};
use crate::weights::load_progress::ProgressReporter;
use crate::wire::command::Scope;
use crate::wire::grouping::Grouping;

/// Loads tensors of safetensors files to the workers of a session.
///
/// A worker that can read a file reads its own part of each tensor from it, directly into its
/// tensor, and little more: pieces that are less than 16 KiB apart are read together with the bytes
/// between them. For a device with memory of its own, the data goes through at most 20 MiB of host
/// memory. A worker that cannot read the file gets its part from one that can, over the data plane,
/// and waits for it as in a collective
/// ([`Options::collective_timeout`](crate::Options::collective_timeout)). If no worker can read it,
/// the controller reads the tensor into its memory and sends each worker its part by
/// [`scatter`](DiscoSession::scatter), or by [`broadcast`](DiscoSession::broadcast) if all get the
/// whole.
///
/// Parts that go over the network stay in the caches of the nodes for the next session if the
/// loader is told to use these ([`with_cache`](Self::with_cache)).
///
/// A worker can read a file if its node allows it ([`WeightFolders`](crate::WeightFolders)), and if
/// a file with the same length and the same header is at the same path. The content of the tensors
/// is not compared: the files of two trainings of one model are taken for the same.
/// [`unreadable`](Self::unreadable) lists the workers that cannot read a file, and why.
///
/// ```
/// use disco::{Part, ShardLoader, ThreadedSession};
/// use rpc_core::Tensor;
///
/// // Two tensors, as any safetensors library writes them.
/// let header = concat!(
///     r#"{"bias":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"#,
///     r#""weight":{"dtype":"F32","shape":[2,2],"data_offsets":[8,24]}}"#,
/// );
/// let data = [0.5_f32, 1.5, 1.0, 2.0, 3.0, 4.0].map(f32::to_le_bytes).concat();
/// let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
/// let folder = tempfile::tempdir().unwrap();
/// std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
///
/// let session = ThreadedSession::new(2, 1).start().wait()?;
/// let loader = ShardLoader::open(&session, folder.path()).wait()?;
/// let part = |rank| if rank > 1 { Part::shard(0) } else { Part::Whole };
/// let weights = loader.load_all(|_, info| Some(part(info.shape.len())), None)?;
/// session.sync_all().wait()?; // tells what could not be loaded
/// let first = session.copy_from_worker_0(&weights["weight"]).wait()?;
/// assert_eq!(first.read()?.as_slice::<f32>()?, [1.0, 2.0]);
/// # Ok::<(), disco::DiscoError>(())
/// ```
///
/// Loads do not wait for the workers, which load one tensor after the other, each at its own pace.
/// Issue all of them, then call [`sync_all`](DiscoSession::sync_all). A failure on a worker poisons
/// the result there, and is returned by that call.
pub struct ShardLoader {
    session: DiscoSession,
    files: Vec<Source>,
    tensors: BTreeMap<String, Located>,
    /// The files as the workers have opened them. They are closed when this is dropped.
    opened: DRef,
    load: DPackedFunc,
    take: DPackedFunc,
    /// Caches of the workers' nodes; `None` if they are not used.
    caches: Option<NodeCaches>,
    unreadable: Vec<Unreadable>,
    reporter: Option<(u64, Arc<ProgressReporter>)>,
    /// True if loads are repeated on workers that replace lost ones.
    is_restorable: bool,
}

/// A file that a worker cannot read by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unreadable {
    /// The worker.
    pub worker: WorkerId,
    /// The file, where the controller has it.
    pub file: PathBuf,
    /// Reason why the worker cannot read it.
    pub reason: String,
}

/// Description of a tensor, and its position in the files of the loader.
struct Located {
    /// Number of the file.
    file: u32,
    /// Start in the file, in bytes.
    start: u64,
    info: TensorInfo,
}

impl Located {
    fn new(file: usize, placed: &Placed) -> Self {
        Self { file: file as u32, start: placed.start, info: placed.info.clone() }
    }
}

/// A file, and the workers that read from it.
struct Source {
    file: WeightFile,
    /// For each worker, the worker that reads for it. `None` if no worker can read the file.
    readers: Option<Vec<u32>>,
}

impl ShardLoader {
    /// Opens a `.safetensors` file; or all files of a model by its `.safetensors.index.json`; or a
    /// folder, which stands for the `model.safetensors.index.json` or `model.safetensors` in it.
    /// Reads the headers at the controller, and lets the workers look for the files at the same
    /// paths.
    ///
    /// Fails if the controller cannot read a file, or if a file is not of the format, with an error
    /// that names the file and its fault; and with the errors of the session. A file that only
    /// workers cannot read is no error.
    pub fn open(session: &DiscoSession, path: impl AsRef<Path>) -> Completion<Self> {
        Self::start(session, path.as_ref(), None)
    }

    /// Opens files as [`open`](Self::open) does, for workers that have them in another `folder`
    /// than the controller. A relative path is relative to the working directory of the workers'
    /// programs.
    pub fn open_at(session: &DiscoSession, path: impl AsRef<Path>, folder: impl Into<PathBuf>) -> Completion<Self> {
        Self::start(session, path.as_ref(), Some(folder.into()))
    }

    fn start(session: &DiscoSession, path: &Path, folder: Option<PathBuf>) -> Completion<Self> {
        let (session, path) = (session.clone(), path.to_owned());
        // Commands block while the workers are behind, so they are issued on a thread that may
        // block.
        Completion::spawn(async move {
            let open = tokio::task::spawn_blocking(move || Self::open_here(session, &path, folder.as_deref())).await;
            open.map_err(|error| RpcError::internal(format!("opening weights panicked: {error}")))?
        })
    }

    fn open_here(session: DiscoSession, path: &Path, folder: Option<&Path>) -> Result<Self> {
        let (files, tensors, wanted) = read_headers(path, folder)?;
        let wanted = Packed::encode(&wanted)?;
        let opened = session.get_global_func("disco.weights.open")?.call((wanted.clone(),))?;
        session.controller().note_files(opened.register(), wanted);
        let told = session.get_global_func("disco.weights.unreadable")?.call((&opened,))?;
        let load = session.get_global_func("disco.weights.load")?;
        let take = session.get_global_func("disco.weights.take")?;
        let mut reasons = Vec::new();
        for told in of_all(&session, &told) {
            let Content::Value(Value::Packed(told)) = told.wait()? else {
                return Err(RpcError::internal("a worker does not say which files it can read").into());
            };
            reasons.push(told.decode::<Vec<Option<String>>>()?);
        }
        let mut unreadable = Vec::new();
        let files = files.into_iter().enumerate();
        let files = files.map(|(number, file)| {
            let reason = |worker: &Vec<Option<String>>| worker.get(number).cloned().flatten();
            let reasons: Vec<_> = reasons.iter().map(reason).collect();
            unreadable.extend((0..).zip(&reasons).filter_map(|(worker, reason)| {
                let reason = reason.clone()?;
                Some(Unreadable { worker: WorkerId(worker), file: file.path.clone(), reason })
            }));
            Source { readers: readers(&reasons), file }
        });
        let files = files.collect();
        for Unreadable { worker, reason, .. } in &unreadable {
            tracing::info!(%worker, %reason, "a worker does not read weights itself");
        }
        let (caches, reporter, is_restorable) = (None, None, false);
        Ok(Self { session, files, tensors, opened, load, take, caches, unreadable, reporter, is_restorable })
    }

    /// Registers a callback for progress. From now on it is called with two numbers whenever one of
    /// them changes: the bytes that all workers together have loaded, and the bytes that all loads
    /// issued so far will bring. It replaces an earlier callback.
    ///
    /// The callback runs on the thread that receives the reports of the workers: it must not block,
    /// use the loader, or drop it. It is not called after the loader has been dropped. Once all
    /// loads have been issued and [`sync_all`](DiscoSession::sync_all) has returned without an
    /// error, the two numbers are equal. A load by a function counts as the whole tensor on each
    /// worker, which has been loaded when the function has returned.
    #[must_use]
    pub fn progress(mut self, progress: impl FnMut(u64, u64) + Send + 'static) -> Self {
        let reporter = Arc::new(ProgressReporter::new(Box::new(progress)));
        self.forget_watcher();
        self.reporter = Some((self.session.controller().watch_loader(Arc::clone(&reporter)), reporter));
        self
    }

    /// Has the tensors that are loaded from now on loaded again by workers that
    /// [replace](DiscoSession::replace) lost ones, as long as the tensors live. These get the
    /// content of the files, so that it is for weights that the program does not change.
    ///
    /// A new worker reads its part by itself: where it cannot read the file, the replacement says
    /// so. A tensor that the controller has read, because no worker could, is not loaded again.
    #[must_use]
    pub fn restorable(mut self) -> Self {
        self.is_restorable = true;
        self
    }

    /// Uses the caches of the workers' nodes (`--file-cache` of `rpc-server`), so that loading the
    /// same weights again needs little of the network: a worker that does not read its part itself
    /// is told the part's SHA-256 before its bytes are sent, and takes it from the cache if it is
    /// there. A part that has come is kept there, as far as it fits. Parts of less than 64 KiB are
    /// sent always.
    ///
    /// Whoever reads a part hashes it, and a node writes and hashes what it keeps: on fast networks
    /// that may take longer than to send everything. A loader counts all that it loads against the
    /// sizes of the caches, also what it loads again: open a new one for each round.
    ///
    /// Blocks until the workers have told the sizes of their caches.
    ///
    /// # Errors
    ///
    /// The session has ended or has lost a worker; inside an async runtime an error of kind
    /// [`ApiMisuse`](rpc_core::ErrorKind::ApiMisuse).
    pub fn with_cache(mut self) -> Result<Self> {
        blocking::check_may_block()?;
        let limits = AskedLimits::issue(&self.session)?.wait()?;
        self.caches = limits.iter().any(|limit| *limit > 0).then(|| NodeCaches::new(&self.session, limits));
        Ok(self)
    }

    /// Returns the tensors, in the order of their names.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, located)| (name.as_str(), &located.info))
    }

    /// Returns the tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name).map(|located| &located.info)
    }

    /// Returns the files that workers cannot read, by worker. These workers get their parts from
    /// others.
    pub fn unreadable(&self) -> &[Unreadable] {
        &self.unreadable
    }

    /// Loads a tensor to all workers, as a new tensor on a device that satisfies `device`, as
    /// [`empty`](DiscoSession::empty) chooses it.
    ///
    /// Does not wait for the workers to load it. Blocks while the window of commands is full
    /// ([`Options::window`](crate::Options::window)); async code awaits
    /// [`room`](DiscoSession::room) before. Blocks too while the controller reads the file, if no
    /// worker can, and until the workers have looked into the caches that are used
    /// ([`with_cache`](Self::with_cache)); inside an async runtime these are not asked.
    ///
    /// # Errors
    ///
    /// There is no tensor of that name; its dimension is not a multiple of the number of workers;
    /// the controller has to read the file, and cannot; the session has ended. Failures on workers
    /// are returned by [`sync_all`](DiscoSession::sync_all).
    pub fn load(&self, name: &str, part: Part, device: Option<VirtualDevice>) -> Result<DRef> {
        self.issue_all(vec![self.prepare(name, part, device)?])?
            .pop()
            .map(|(_, loaded)| loaded)
            .ok_or_else(|| RpcError::internal("a load that was not issued").into())
    }

    /// Loads all tensors for which `rule` returns a part, as [`load`](Self::load) does. If one of
    /// them cannot be divided as the rule says, none is loaded. If the controller has to read a
    /// file and cannot, the tensors before it have been loaded.
    ///
    /// # Errors
    ///
    /// Those of [`load`](Self::load).
    pub fn load_all(
        &self,
        mut rule: impl FnMut(&str, &TensorInfo) -> Option<Part>,
        device: Option<VirtualDevice>,
    ) -> Result<BTreeMap<String, DRef>> {
        let wanted = self.tensors().filter_map(|(name, info)| Some((name, rule(name, info)?)));
        let loads: Vec<_> =
            wanted.map(|(name, part)| self.prepare(name, part, device.clone())).collect::<Result<_>>()?;
        Ok(self.issue_all(loads)?.into_iter().collect())
    }

    /// Issues loads, until one fails.
    fn issue_all(&self, loads: Vec<Load>) -> Result<Vec<(String, DRef)>> {
        let mut left = loads.iter().fold(0, |sum: u64, load| sum.saturating_add(load.bytes));
        if let Some((_, reporter)) = &self.reporter {
            reporter.expect(left);
        }
        let mut issued = Vec::with_capacity(loads.len());
        // Loads whose parts are looked for, and those behind them, which have been issued.
        let mut begun = VecDeque::new();
        let mut finish = |(name, bytes, load): (String, u64, Begun)| {
            issued.push((name, self.finish(load)?));
            left = left.saturating_sub(bytes);
            Ok(())
        };
        let mut issue = |loads: Vec<Load>| -> Result<()> {
            for load in loads {
                if begun.len() == MAX_BEGUN {
                    begun.pop_front().map_or(Ok(()), &mut finish)?;
                }
                begun.push_back((load.request.name.clone(), load.bytes, self.begin(load)?));
            }
            Ok(())
        };
        let outcome = issue(loads);
        // Those before the one that fails are loaded.
        let finished = begun.into_iter().try_for_each(&mut finish);
        let outcome = outcome.and(finished);
        if left > 0
            && let Some((_, reporter)) = &self.reporter
        {
            reporter.expect_not(left);
        }
        outcome.map(|()| issued)
    }

    fn forget_watcher(&mut self) {
        if let Some((number, reporter)) = self.reporter.take() {
            self.session.controller().forget_loader(number);
            reporter.close();
        }
    }

    fn prepare(&self, name: &str, part: Part, device: Option<VirtualDevice>) -> Result<Load> {
        let Some(Located { file, start, info: TensorInfo { dtype, shape, .. } }) = self.tensors.get(name) else {
            let count = self.tensors.len();
            return Err(
                RpcError::not_found(format!("there is no tensor '{name}' among the {count} of the loader")).into()
            );
        };
        let source = self.source(*file)?;
        let request = LoadRequest {
            file: *file,
            name: name.to_owned(),
            dtype: *dtype,
            shape: shape.clone(),
            start: *start,
            part,
            device,
            readers: source.readers.clone().unwrap_or_default(),
            cached: Vec::new(),
            loader: self.reporter.as_ref().map_or(0, |(number, _)| *number),
        };
        let (size, groups) = (self.session.num_workers(), self.session.num_groups());
        let slices =
            (0..size).map(|worker| request.slice(WorkerId(worker), size, groups)).collect::<rpc_core::Result<_>>();
        let slices: Vec<TensorSlice> = slices.map_err(|error| {
            let path = source.file.path.display();
            error.context(format_args!("tensor '{name}' of {dtype} {shape:?} in {path}"))
        })?;
        let bytes = slices.iter().fold(0, |sum: u64, slice| sum.saturating_add(slice.size_bytes));
        Ok(Load { bytes, request, slices })
    }

    /// Returns, for each worker, true if its part is to go through the cache of its node.
    fn cached(&self, load: &Load) -> Vec<bool> {
        let Some(caches) = &self.caches else { return Vec::new() };
        let readers = &load.request.readers;
        let is_sent = |worker: u32| readers.get(worker as usize) != Some(&worker);
        // All parts are equal.
        let part_len = load.slices.first().map_or(0, |slice| slice.size_bytes);
        caches.admit(&load.request.part, part_len, is_sent)
    }

    fn source(&self, file: u32) -> Result<&Source> {
        let missing = || RpcError::internal(format!("a loader has no file {file}"));
        Ok(self.files.get(file as usize).ok_or_else(missing)?)
    }

    /// Issues a load, or has the workers look for its parts.
    fn begin(&self, mut load: Load) -> Result<Begun> {
        let source = self.source(load.request.file)?;
        // A controller that reads has to wait for the answers of the nodes.
        if source.readers.is_some() || blocking::check_may_block().is_ok() {
            load.request.cached = self.cached(&load);
        }
        if source.readers.is_some() && load.bytes > 0 {
            let loaded = self.load.call((&self.opened, Pack(&load.request)))?;
            if self.is_restorable {
                // A new worker reads for itself and for no other.
                let readers = (0..self.session.num_workers()).collect();
                let again = LoadRequest { readers, loader: 0, cached: Vec::new(), ..load.request };
                let again = Packed::encode(&again)?;
                self.session.controller().note_weight(loaded.register(), self.opened.register(), again);
            }
            return Ok(Begun::Issued(loaded));
        }
        if load.request.cached.is_empty() {
            return Ok(Begun::Issued(self.send(&load, &vec![true; load.slices.len()], None)?));
        }
        let file = self.open_file(&load)?;
        let digests = load.distinct(&self.session).0.into_iter().map(|part| digest_of_part(part, &file));
        let digests = digests.collect::<rpc_core::Result<_>>().map_err(|error| load.request.with_tensor_name(error))?;
        let find = FindRequest { load: load.request.clone(), digests };
        let found = self.session.get_global_func("disco.weights.find")?.call((Pack(find),))?;
        let is_found = self.session.get_global_func("disco.weights.is_found")?.call((&found,))?;
        let answers = of_all(&self.session, &is_found);
        Ok(Begun::Offered { load: Box::new(load), found, answers })
    }

    /// Sends the parts that were looked for and are not there.
    fn finish(&self, load: Begun) -> Result<DRef> {
        let (load, found, answers) = match load {
            Begun::Issued(loaded) => return Ok(loaded),
            Begun::Offered { load, found, answers } => (load, found, answers),
        };
        let mut lacking = Vec::with_capacity(answers.len());
        for answer in answers {
            match answer.wait() {
                Ok(Content::Value(is_found)) => lacking.push(is_found != Value::Bool(true)),
                Ok(Content::Tensor(_)) => return Err(RpcError::internal("a worker answers with a tensor").into()),
                Err(error) => return Err(error),
            }
        }
        self.send(&load, &lacking, Some(found))
    }

    /// Opens the file of a load at the controller.
    fn open_file(&self, load: &Load) -> Result<InFile> {
        let file = &self.source(load.request.file)?.file;
        let opened = file.open().map_err(|error| load.request.with_tensor_name(error))?;
        Ok(InFile { file: opened, path: file.path.clone(), start: load.request.start })
    }

    /// Sends the parts of workers that lack theirs, which the controller reads. The others have
    /// theirs in `found`.
    fn send(&self, load: &Load, lacking: &[bool], found: Option<DRef>) -> Result<DRef> {
        let missing = lacking.iter().filter(|is_lacking| **is_lacking).count();
        let file = if missing > 0 { Some(self.open_file(load)?) } else { None };
        let (parts, scope) = load.distinct(&self.session);
        let read = |parts: &[&TensorSlice]| -> rpc_core::Result<_> {
            let each = parts.first().map_or(0, |part| part.size_bytes as usize);
            let tensor = Tensor::zeros([parts.len() as i64, each as i64], DataType::U8)?;
            let mut view = tensor.write()?;
            if let Some(file) = &file {
                for (part, out) in parts.iter().zip(view.bytes_mut()?.chunks_exact_mut(each.max(1))) {
                    part.read(file, 0, out, &mut |_| ())?;
                }
            }
            drop(view);
            Ok(tensor)
        };
        let named = |error| load.request.with_tensor_name(error);
        let bytes = match (found, scope) {
            (Some(found), _) if missing == 0 => found,
            // Part by part, to the workers that lack theirs.
            (Some(found), scope) if missing < lacking.len() && (scope.is_some() || missing == 1) => {
                for (worker, _) in (0..).map(WorkerId).zip(lacking).filter(|(_, is_lacking)| **is_lacking) {
                    let part = read(&[parts[load.rank(&self.session, worker)]]).map_err(named)?;
                    self.session.debug_set_register(&found, worker, &part)?;
                }
                found
            }
            (_, Some(scope)) => self.session.scatter(&read(&parts).map_err(named)?, None, scope)?,
            (_, None) => self.session.broadcast(&read(&parts).map_err(named)?, None, Scope::World)?,
        };
        // Parts that workers lacked are new to the caches of their nodes.
        let is_new = |(is_cached, is_lacking): (&bool, &bool)| *is_cached && *is_lacking;
        let new = load.request.cached.iter().zip(lacking).map(is_new).collect();
        let cached = self.caches.as_ref().map_or_else(Vec::new, |caches| caches.keepers(&load.request.part, new));
        self.take.call((&bytes, Pack(LoadRequest { cached, ..load.request.clone() })))
    }
}

/// Loads whose parts are looked for at a time.
const MAX_BEGUN: usize = 8;

/// A load that has begun.
enum Begun {
    /// The workers load it.
    Issued(DRef),
    /// The workers look for their parts in the caches of their nodes.
    Offered {
        load: Box<Load>,
        /// The bytes of a worker's part, or null.
        found: DRef,
        /// For each worker, true if it has its part.
        answers: Vec<Completion<Content>>,
    },
}

impl Drop for ShardLoader {
    fn drop(&mut self) {
        self.forget_watcher();
    }
}

impl fmt::Debug for ShardLoader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShardLoader({} tensors in {} files)", self.tensors.len(), self.files.len())
    }
}

/// A load that has been checked, and can be issued.
struct Load {
    request: LoadRequest,
    /// Part of each worker.
    slices: Vec<TensorSlice>,
    /// Bytes for all workers together.
    bytes: u64,
}

impl Load {
    /// Returns the parts that differ, and the scope among whose workers they are divided. All
    /// workers get the same one if there is no scope.
    fn distinct(&self, session: &DiscoSession) -> (Vec<&TensorSlice>, Option<Scope>) {
        let (members, scope) = match &self.request.part {
            Part::Whole | Part::With { .. } => (Grouping::of_blocks(1), None),
            Part::Shard { scope, .. } => (session.controller().layout.grouping(*scope), Some(*scope)),
        };
        // The first worker is in the first group.
        let parts = members.members(WorkerId(0)).filter_map(|worker| self.slices.get(worker.index()));
        (parts.collect(), scope)
    }

    /// Returns the index of a worker's part among those that differ.
    fn rank(&self, session: &DiscoSession, worker: WorkerId) -> usize {
        match &self.request.part {
            Part::Whole | Part::With { .. } => 0,
            Part::Shard { scope, .. } => session.controller().layout.grouping(*scope).rank(worker).index(),
        }
    }
}

type Headers = (Vec<WeightFile>, BTreeMap<String, Located>, Vec<RequestedFile>);

/// Finds the files and reads their headers. Returns the files, the tensors by name, and the
/// requests for workers to open the files.
fn read_headers(path: &Path, folder: Option<&Path>) -> Result<Headers> {
    let model = Model::find(path)?;
    let mut files = Vec::new();
    let mut wanted = Vec::new();
    for name in &model.files {
        let file = WeightFile::read(model.folder.join(name))?;
        let path = folder.unwrap_or(&model.folder).join(name);
        let Ok(path) = path.into_os_string().into_string() else {
            return Err(DiscoError::invalid(format!("{}: its name is not one in UTF-8", file.path.display())));
        };
        wanted.push(RequestedFile { path, identity: file.identity.clone() });
        files.push(file);
    }
    let mut tensors = BTreeMap::new();
    if let Some(index) = model.index {
        for (name, number) in index {
            let file = files.get(number);
            let Some(placed) = file.and_then(|file| file.header.tensors.get(&name)) else {
                let path = file.map_or(path, |file| file.path.as_path()).display();
                let text = format!("{path}: the index says that tensor '{name}' is there, and it is not");
                return Err(RpcError::not_found(text).into());
            };
            tensors.insert(name, Located::new(number, placed));
        }
    } else {
        let all = files.iter().flat_map(|file| &file.header.tensors);
        tensors.extend(all.map(|(name, placed)| (name.clone(), Located::new(0, placed))));
    }
    Ok((files, tensors, wanted))
}

/// Returns, for each worker, the worker that reads for it: itself if it has no reason not to, and
/// otherwise the workers that can, in turn. `None` if none can.
fn readers(reasons: &[Option<String>]) -> Option<Vec<u32>> {
    let able: Vec<u32> = (0..).zip(reasons).filter(|(_, reason)| reason.is_none()).map(|(worker, _)| worker).collect();
    let mut in_turn = able.iter().copied().cycle();
    let reader =
        |(worker, reason): (u32, &Option<String>)| if reason.is_none() { Some(worker) } else { in_turn.next() };
    (0..).zip(reasons).map(reader).collect()
}
