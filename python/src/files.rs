//! Files of a session's workspace.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::UNIX_EPOCH;

use bytes::Bytes;
use pyo3::exceptions::{PyBlockingIOError, PyOSError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};
use rpc_core::client::{self, CHUNK, Digest, FileEntry};
use rpc_core::{ErrorKind, Result, RpcError};
use rpc_server::modules::hash;

use crate::buffer;
use crate::errors;
use crate::operation::{Born, Limits, Operation, Options, UserCalls};
use crate::session::Session;

/// Files of a session's workspace.
#[pyclass(frozen, subclass, module = "tensor_rpc._native")]
pub(crate) struct Files(Born<rpc_core::Session>);

/// Source of an upload.
enum Source {
    Bytes(Bytes),
    File(File, PathBuf),
    Reader(PyFile),
}

/// Destination of a download.
enum Sink {
    /// An object of bytes.
    Bytes,
    Path(PathBuf),
    Writer(PyFile),
}

/// A file object of Python.
pub(crate) struct PyFile {
    object: Py<PyAny>,
    calls: UserCalls,
}

impl PyFile {
    pub(crate) fn new(object: &Bound<'_, PyAny>, calls: &UserCalls) -> Self {
        Self { object: object.clone().unbind(), calls: calls.clone() }
    }

    fn call<T>(&self, call: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>) -> io::Result<T> {
        // The exception itself ends the operation, and this is seen by nobody.
        let raised = || io::Error::other("a file object has raised an exception");
        self.calls.call(|py| call(self.object.bind(py))).ok_or_else(raised)
    }
}

impl Read for PyFile {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let wanted = out.len().min(CHUNK);
        let piece = self.call(|file| {
            let piece = file.call_method1("read", (wanted,))?;
            if piece.is_none() {
                return Err(PyBlockingIOError::new_err("the file object does not block, and has nothing to read now"));
            }
            let piece = buffer::bytes(&piece)?;
            if piece.len() > wanted {
                return Err(PyOSError::new_err("read() has returned more than was asked for"));
            }
            Ok(piece)
        })?;
        out[..piece.len()].copy_from_slice(&piece);
        Ok(piece.len())
    }
}

impl Write for PyFile {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        self.call(|file| {
            let written = file.call_method1("write", (PyBytes::new(file.py(), piece),))?;
            // Some files return nothing, and have written all.
            let written = if written.is_none() { piece.len() } else { written.extract()? };
            Ok(written.min(piece.len()))
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A local file that has its name once it is complete, and is removed otherwise.
struct NewFile {
    file: File,
    part: PathBuf,
    path: PathBuf,
    is_complete: bool,
}

impl NewFile {
    fn create(path: &Path) -> io::Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        if path.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let mut part = path.as_os_str().to_owned();
        part.push(format!(".{}-{number}.part", std::process::id()));
        let part = PathBuf::from(part);
        let file = File::create_new(&part)?;
        Ok(Self { file, part, path: path.to_owned(), is_complete: false })
    }

    fn commit(mut self) -> io::Result<()> {
        fs::rename(&self.part, &self.path)?;
        self.is_complete = true;
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.is_complete {
            let _ = fs::remove_file(&self.part);
        }
    }
}

fn local(error: io::Error, path: &Path) -> RpcError {
    RpcError::new(ErrorKind::Io, format!("{}: {error}", path.display()))
}

/// Returns the path that an object names: a str, or an object with `__fspath__`.
fn path_of(object: &Bound<'_, PyAny>) -> PyResult<Option<PathBuf>> {
    if object.cast::<PyString>().is_ok() || object.hasattr("__fspath__")? {
        return object.extract().map(Some);
    }
    Ok(None)
}

fn source(object: &Bound<'_, PyAny>, calls: &UserCalls) -> PyResult<Source> {
    if let Some(path) = path_of(object)? {
        let file = File::open(&path).map_err(|error| errors::os_error(object.py(), &error, &path))?;
        return Ok(Source::File(file, path));
    }
    if object.hasattr("read")? {
        return Ok(Source::Reader(PyFile::new(object, calls)));
    }
    buffer::bytes(object).map(Source::Bytes).map_err(|_| {
        PyTypeError::new_err(
            "a file is sent from a path (str or os.PathLike), from bytes, or from an object with read()",
        )
    })
}

fn sink(object: Option<&Bound<'_, PyAny>>, calls: &UserCalls) -> PyResult<Sink> {
    let Some(object) = object else { return Ok(Sink::Bytes) };
    match path_of(object)? {
        Some(path) => Ok(Sink::Path(path)),
        None if object.hasattr("write")? => Ok(Sink::Writer(PyFile::new(object, calls))),
        None => {
            Err(PyTypeError::new_err("a file is stored at a path (str or os.PathLike), or in an object with write()"))
        }
    }
}

/// Content that a download returns.
enum Received {
    Bytes(Vec<u8>),
    Len(u64),
}

impl Received {
    fn into_object(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match self {
            Self::Bytes(bytes) => Ok(PyBytes::new(py, &bytes).into_any().unbind()),
            Self::Len(len) => Ok(len.into_pyobject(py)?.into_any().unbind()),
        }
    }
}

/// Reads a file of the workspace from `start` on into `sink`.
async fn receive(
    file: &client::RemoteFile,
    start: u64,
    sink: Sink,
    limits: &Limits,
    calls: &UserCalls,
    progress: Option<Arc<Py<PyAny>>>,
) -> Result<Received> {
    let get =
        async |sink: &mut (dyn Write + Send)| limits.apply(calls.report(file.read_from(start, sink), progress)).await;
    match sink {
        Sink::Bytes => {
            let mut bytes = Vec::new();
            get(&mut bytes).await?;
            Ok(Received::Bytes(bytes))
        }
        Sink::Path(path) => {
            let mut made = NewFile::create(&path).map_err(|error| local(error, &path))?;
            let len = get(&mut made.file).await?;
            calls.check()?;
            made.commit().map_err(|error| local(error, &path))?;
            Ok(Received::Len(len.saturating_sub(start)))
        }
        Sink::Writer(mut file) => get(&mut file).await.map(|len| Received::Len(len.saturating_sub(start))),
    }
}

/// Sends a local file so that what has arrived stays when the transfer is cut, and goes on behind
/// what an earlier transfer has left.
async fn resume(
    files: &client::Files,
    path: &str,
    mut file: File,
    name: &Path,
    limits: &Limits,
    report: (&UserCalls, Option<Arc<Py<PyAny>>>),
) -> Result<u64> {
    use std::io::Seek as _;
    let failed = |error| local(error, name);
    let len = file.metadata().map_err(failed)?.len();
    let mut upload = limits.apply(files.put_resumable(path, len)).await?;
    if upload.part_len() > 0 {
        let is_same = upload.part_len() <= len
            && hash((&file).take(upload.part_len())).map_err(failed)? == (upload.part_digest(), upload.part_len());
        if !is_same {
            limits.apply(upload.discard()).await?;
            upload = limits.apply(files.put_resumable(path, len)).await?;
        }
    }
    file.seek(io::SeekFrom::Start(upload.part_len())).map_err(failed)?;
    let (calls, progress) = report;
    limits.apply(calls.report(upload.finish(file), progress)).await
}

impl Files {
    pub(crate) fn of(session: rpc_core::Session) -> Self {
        Self(Born::new(session))
    }

    fn files(&self) -> PyResult<client::Files> {
        Ok(client::Files::new(self.0.get()?))
    }
}

#[pymethods]
impl Files {
    #[new]
    fn new(session: &Bound<'_, Session>) -> PyResult<Self> {
        Ok(Self::of(session.get().session(session.py())?))
    }

    #[pyo3(signature = (
        path, source, executable = false, resumable = false, progress = None, timeout = None, lane = None
    ))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn put_op(
        &self,
        path: String,
        source: &Bound<'_, PyAny>,
        executable: bool,
        resumable: bool,
        progress: Option<Py<PyAny>>,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let (files, options) = (self.files()?, Options::new(timeout, lane)?);
        let (calls, progress) = (UserCalls::default(), progress.map(Arc::new));
        let source = self::source(source, &calls)?;
        if resumable && !matches!(source, Source::File(..)) {
            return Err(PyTypeError::new_err("a resumable transfer has the path of a local file as its source"));
        }
        let reported = calls.clone();
        let work = async move {
            let limits = options.begin();
            let sent = match source {
                Source::Bytes(bytes) => limits.apply(reported.report(files.put_bytes(&path, bytes), progress)).await?,
                Source::File(file, name) if resumable => {
                    resume(&files, &path, file, &name, &limits, (&reported, progress)).await?
                }
                Source::File(file, name) => {
                    let len = file.metadata().map_err(|error| local(error, &name))?.len();
                    limits.apply(reported.report(files.put_sized(&path, len, file), progress)).await?
                }
                Source::Reader(file) => limits.apply(reported.report(files.put(&path, file), progress)).await?,
            };
            if executable {
                limits.apply(files.set_executable(&path, true)).await?;
            }
            Ok(sent)
        };
        Ok(Operation::with_calls(&calls, work, |py, _, len| Ok(len.into_pyobject(py)?.into_any().unbind())))
    }

    #[pyo3(signature = (path, to = None, progress = None, timeout = None, lane = None))]
    fn get_op(
        &self,
        path: String,
        to: Option<&Bound<'_, PyAny>>,
        progress: Option<Py<PyAny>>,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let (files, options) = (self.files()?, Options::new(timeout, lane)?);
        let (calls, progress) = (UserCalls::default(), progress.map(Arc::new));
        let sink = sink(to, &calls)?;
        let reported = calls.clone();
        let work = async move {
            let limits = options.begin();
            let file = limits.apply(files.open(&path)).await?;
            receive(&file, 0, sink, &limits, &reported, progress).await
        };
        Ok(Operation::with_calls(&calls, work, |py, _, received| received.into_object(py)))
    }

    #[pyo3(signature = (path, timeout = None, lane = None))]
    fn open_op(&self, path: String, timeout: Option<f64>, lane: Option<u32>) -> PyResult<Operation> {
        let (files, options) = (self.files()?, Options::new(timeout, lane)?);
        let work = async move { options.apply(files.open(&path)).await };
        Ok(Operation::new(work, |py, form, file| {
            let native = Bound::new(py, RemoteFile(Born::new(Arc::new(file))))?;
            form.wrap(py, "RemoteFile", native.into_any()).map(Bound::unbind)
        }))
    }

    /// Lists files: tuples of name, size, seconds since 1970, and if it may be executed.
    #[pyo3(signature = (folder, timeout = None, lane = None))]
    fn ls_op(&self, folder: String, timeout: Option<f64>, lane: Option<u32>) -> PyResult<Operation> {
        let (files, options) = (self.files()?, Options::new(timeout, lane)?);
        let work = async move { options.apply(files.ls(&folder)).await };
        Ok(Operation::new(work, |py, _, entries: Vec<FileEntry>| {
            let seconds = |entry: &FileEntry| match entry.modified.duration_since(UNIX_EPOCH) {
                Ok(since) => since.as_secs_f64(),
                Err(before) => -before.duration().as_secs_f64(),
            };
            let tuple = |entry: FileEntry| {
                let modified = seconds(&entry);
                (entry.name, entry.size, modified, entry.executable)
            };
            Ok(entries.into_iter().map(tuple).collect::<Vec<_>>().into_pyobject(py)?.unbind())
        }))
    }

    #[pyo3(signature = (path, timeout = None, lane = None))]
    fn rm_op(&self, path: String, timeout: Option<f64>, lane: Option<u32>) -> PyResult<Operation> {
        let (files, options) = (self.files()?, Options::new(timeout, lane)?);
        Ok(Operation::unit(async move { options.apply(files.rm(&path)).await }))
    }

    #[pyo3(signature = (path, executable, timeout = None, lane = None))]
    fn set_executable_op(
        &self,
        path: String,
        executable: bool,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let (files, options) = (self.files()?, Options::new(timeout, lane)?);
        Ok(Operation::unit(async move { options.apply(files.set_executable(&path, executable)).await }))
    }

    #[pyo3(signature = (timeout = None, lane = None))]
    fn folders_op(&self, timeout: Option<f64>, lane: Option<u32>) -> PyResult<Operation> {
        let (files, options) = (self.files()?, Options::new(timeout, lane)?);
        let work = async move { options.apply(files.folders()).await };
        Ok(Operation::new(work, |py, _, folders| Ok(folders.into_pyobject(py)?.unbind())))
    }

    #[pyo3(signature = (path, timeout = None, lane = None))]
    fn create_folder_op(&self, path: String, timeout: Option<f64>, lane: Option<u32>) -> PyResult<Operation> {
        let (files, options) = (self.files()?, Options::new(timeout, lane)?);
        Ok(Operation::unit(async move { options.apply(files.create_folder(&path)).await }))
    }

    /// Asks for the SHA-256 of a file.
    #[pyo3(signature = (path, timeout = None, lane = None))]
    fn digest_op(&self, path: String, timeout: Option<f64>, lane: Option<u32>) -> PyResult<Operation> {
        let (files, options) = (self.files()?, Options::new(timeout, lane)?);
        let work = async move { options.apply(files.digest(&path)).await };
        Ok(Operation::new(work, digest))
    }

    /// Brings a local file to the workspace, from the server's cache of files if it has it, and
    /// returns true if it was sent.
    #[pyo3(signature = (path, source, executable = false, progress = None, timeout = None, lane = None))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn put_cached_op(
        &self,
        py: Python<'_>,
        path: String,
        source: PathBuf,
        executable: bool,
        progress: Option<Py<PyAny>>,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        use std::io::Seek as _;
        let (files, options) = (self.files()?, Options::new(timeout, lane)?);
        let (calls, progress) = (UserCalls::default(), progress.map(Arc::new));
        let mut file = File::open(&source).map_err(|error| errors::os_error(py, &error, &source))?;
        let reported = calls.clone();
        let work = async move {
            let limits = options.begin();
            let failed = |error| local(error, &source);
            let (digest, len) = hash(&file).map_err(failed)?;
            file.rewind().map_err(failed)?;
            match limits.apply(files.cache()).await? {
                Some(cache) => {
                    let put = cache.put(&path, digest, len, executable, file);
                    limits.apply(reported.report(put, progress)).await
                }
                None => {
                    limits.apply(reported.report(files.put_sized(&path, len, file), progress)).await?;
                    if executable {
                        limits.apply(files.set_executable(&path, true)).await?;
                    }
                    Ok(true)
                }
            }
        };
        Ok(Operation::with_calls(&calls, work, |py, _, sent: bool| {
            Ok(sent.into_pyobject(py)?.to_owned().into_any().unbind())
        }))
    }
}

fn digest(py: Python<'_>, _: crate::form::Form, digest: Digest) -> PyResult<Py<PyAny>> {
    Ok(digest.to_string().into_pyobject(py)?.into_any().unbind())
}

/// A file of the workspace, open for reading.
#[pyclass(frozen, subclass, module = "tensor_rpc._native")]
pub(crate) struct RemoteFile(Born<Arc<client::RemoteFile>>);

#[pymethods]
impl RemoteFile {
    #[new]
    fn new(other: &Bound<'_, Self>) -> Self {
        Self(other.get().0.clone())
    }

    /// Length in bytes.
    #[getter]
    fn size(&self) -> u64 {
        self.0.facts().len()
    }

    #[pyo3(signature = (start = 0, to = None, progress = None, timeout = None, lane = None))]
    fn read_op(
        &self,
        start: u64,
        to: Option<&Bound<'_, PyAny>>,
        progress: Option<Py<PyAny>>,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let (file, options) = (self.0.get()?.clone(), Options::new(timeout, lane)?);
        let (calls, progress) = (UserCalls::default(), progress.map(Arc::new));
        let sink = sink(to, &calls)?;
        let reported = calls.clone();
        let work = async move { receive(&file, start, sink, &options.begin(), &reported, progress).await };
        Ok(Operation::with_calls(&calls, work, |py, _, received| received.into_object(py)))
    }

    /// Asks for the SHA-256 of the first bytes.
    #[pyo3(signature = (size, timeout = None, lane = None))]
    fn prefix_digest_op(&self, size: u64, timeout: Option<f64>, lane: Option<u32>) -> PyResult<Operation> {
        let (file, options) = (self.0.get()?.clone(), Options::new(timeout, lane)?);
        let work = async move { options.apply(file.prefix_digest(size)).await };
        Ok(Operation::new(work, digest))
    }
}
