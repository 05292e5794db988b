//! [`ShardLoader`], the controller's side of loading: the tensors of the files, the workers that
//! can read each file, and the loads that they are to do.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rpc_core::{DataType, Pack, Packed, RpcError, Tensor, Value, VirtualDevice};

use super::Part;
use super::files::{InFile, Model, WeightFile};
use super::format::{Placed, TensorInfo};
use super::messages::{LoadRequest, RequestedFile};
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
        let workers = (0..session.num_workers()).map(WorkerId);
        let told: Vec<_> = workers.map(|worker| session.debug_get_from_remote(&told, worker)).collect();
        let mut reasons = Vec::new();
        for told in told {
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
        Ok(Self { session, files, tensors, opened, load, take, unreadable, reporter: None, is_restorable: false })
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
    /// worker can.
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
        let issued = loads.into_iter().map(|load| {
            let (name, bytes) = (load.request.name.clone(), load.bytes);
            let issued = self.issue(load)?;
            left = left.saturating_sub(bytes);
            Ok((name, issued))
        });
        let issued = issued.collect();
        if left > 0
            && let Some((_, reporter)) = &self.reporter
        {
            reporter.expect_not(left);
        }
        issued
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

    fn source(&self, file: u32) -> Result<&Source> {
        let missing = || RpcError::internal(format!("a loader has no file {file}"));
        Ok(self.files.get(file as usize).ok_or_else(missing)?)
    }

    fn issue(&self, load: Load) -> Result<DRef> {
        let Load { request, slices, bytes: _ } = load;
        let source = self.source(request.file)?;
        if source.readers.is_some() && slices.iter().any(|slice| slice.size_bytes > 0) {
            let loaded = self.load.call((&self.opened, Pack(&request)))?;
            if self.is_restorable {
                // A new worker reads for itself and for no other.
                let readers = (0..self.session.num_workers()).collect();
                let again = Packed::encode(&LoadRequest { readers, loader: 0, ..request })?;
                self.session.controller().note_weight(loaded.register(), self.opened.register(), again);
            }
            return Ok(loaded);
        }
        let read = || -> rpc_core::Result<_> {
            let file = InFile { file: source.file.open()?, path: source.file.path.clone(), start: request.start };
            // All workers get the same bytes if the tensor is not divided, and all groups if each
            // divides it among its workers.
            let (members, scope) = match &request.part {
                Part::Whole | Part::With { .. } => (Grouping::of_blocks(1), None),
                Part::Shard { scope, .. } => (self.session.controller().layout.grouping(*scope), Some(*scope)),
            };
            // The first worker is in the first group.
            let parts = members.members(WorkerId(0)).filter_map(|worker| slices.get(worker.index()));
            let parts: Vec<&TensorSlice> = parts.collect();
            let each = parts.first().map_or(0, |part| part.size_bytes as usize);
            let tensor = Tensor::zeros([parts.len() as i64, each as i64], DataType::U8)?;
            let mut view = tensor.write()?;
            for (part, out) in parts.iter().zip(view.bytes_mut()?.chunks_exact_mut(each.max(1))) {
                part.read(&file, 0, out, &mut |_| ())?;
            }
            drop(view);
            Ok((tensor, scope))
        };
        let read = read().map_err(|error| error.context(format_args!("tensor '{}'", request.name)));
        let come = match read? {
            (tensor, Some(scope)) => self.session.scatter(&tensor, None, scope)?,
            (tensor, None) => self.session.broadcast(&tensor, None, Scope::World)?,
        };
        self.take.call((&come, Pack(request)))
    }
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
