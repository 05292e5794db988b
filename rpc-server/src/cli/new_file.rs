//! A local file that gets its name when it is complete, so that a download which fails, or is
//! interrupted, leaves the old one in place and nothing beside it.

use std::fs::{self, File};
use std::io::{self, Seek, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::{NamedTempFile, TempPath};

use super::failure::Failure;
use super::output::Output;

/// Permissions of a new file, before the umask.
const MODE: u32 = 0o666;

/// A file in the folder of its target. Dropping it removes it and says so, unless it was
/// [persisted](Self::persist).
pub(super) struct NewFile {
    target: PathBuf,
    folder: PathBuf,
    output: Output,
    file: File,
    /// Its name as long as it is incomplete, if it has to have one.
    name: Option<TempPath>,
    is_complete: bool,
}

impl NewFile {
    /// Creates the file that is to become `target`. Where the system has files without a name, it
    /// has none: then nothing is left even if this process is killed.
    pub(super) fn create(target: &Path, output: &Output) -> Result<Self, Failure> {
        let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let (file, name) = match unnamed(folder) {
            Some(file) => (file, None),
            None => {
                let created = named(folder).map_err(|error| Failure::file("cannot write", target, error))?;
                let (file, name) = created.into_parts();
                (file, Some(name))
            }
        };
        let (target, folder) = (target.to_owned(), folder.to_owned());
        Ok(Self { target, folder, output: *output, file, name, is_complete: false })
    }

    /// Returns the file, for a thread that writes to it while this value stays where it is.
    pub(super) fn writer(&self) -> Result<File, Failure> {
        self.file.try_clone().map_err(|error| Failure::file("cannot write", &self.target, error))
    }

    /// Lets all who may read the file execute it.
    pub(super) fn set_executable(&self) -> Result<(), Failure> {
        set_executable(&self.file).map_err(|error| Failure::file("cannot write", &self.target, error))
    }

    /// Gives the complete file its name. What had the name before is replaced.
    pub(super) fn persist(mut self) -> Result<(), Failure> {
        let complete = match self.name.take() {
            Some(path) => Ok(path),
            // The system may have files without a name, and let nobody name them later.
            None => link(&self.file, &self.folder).or_else(|_| copy(&mut self.file, &self.folder)),
        };
        let renamed = complete.and_then(|path| path.persist(&self.target).map_err(|error| error.error));
        renamed.map_err(|error| Failure::file("cannot write", &self.target, error))?;
        self.is_complete = true;
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.is_complete {
            self.output.note(&format!("{}: incomplete, and not kept", self.target.display()));
        }
    }
}

impl Write for NewFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Lets all who may read a file execute it.
pub(super) fn set_executable(file: &File) -> io::Result<()> {
    let mode = file.metadata()?.permissions().mode();
    file.set_permissions(fs::Permissions::from_mode(mode | (mode & 0o444) >> 2))
}

fn named(folder: &Path) -> io::Result<NamedTempFile> {
    builder().permissions(fs::Permissions::from_mode(MODE)).tempfile_in(folder)
}

/// Copies a file to one with a temporary name in `folder`.
fn copy(file: &mut File, folder: &Path) -> io::Result<TempPath> {
    let mut copy = named(folder)?;
    file.rewind()?;
    io::copy(file, copy.as_file_mut())?;
    copy.as_file().set_permissions(file.metadata()?.permissions())?;
    Ok(copy.into_temp_path())
}

fn builder() -> tempfile::Builder<'static, 'static> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".rpc-cli-");
    builder
}

/// The names of this process's descriptors, through which a file without a name gets one.
#[cfg(target_os = "linux")]
const DESCRIPTORS: &str = "/proc/self/fd";

/// Returns a file without a name on the file system of `folder`; `None` where there are none.
#[cfg(target_os = "linux")]
fn unnamed(folder: &Path) -> Option<File> {
    use rustix::fs::{Mode, OFlags};

    if !Path::new(DESCRIPTORS).is_dir() {
        return None;
    }
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    rustix::fs::open(folder, flags, Mode::from_raw_mode(MODE)).ok().map(File::from)
}

#[cfg(not(target_os = "linux"))]
fn unnamed(_folder: &Path) -> Option<File> {
    None
}

/// Gives a file without a name a temporary one in `folder`: only a rename replaces another file.
#[cfg(target_os = "linux")]
fn link(file: &File, folder: &Path) -> io::Result<TempPath> {
    use std::os::fd::AsRawFd;

    use rustix::fs::{AtFlags, CWD};

    let descriptor = format!("{DESCRIPTORS}/{}", file.as_raw_fd());
    let linked = builder().make_in(folder, |path| {
        rustix::fs::linkat(CWD, descriptor.as_str(), CWD, path, AtFlags::SYMLINK_FOLLOW).map_err(io::Error::from)
    })?;
    Ok(linked.into_temp_path())
}

#[cfg(not(target_os = "linux"))]
fn link(_file: &File, _folder: &Path) -> io::Result<TempPath> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::super::output::ColorChoice;
    use super::*;

    fn output() -> Output {
        Output::new(false, true, ColorChoice::Never)
    }

    fn names(folder: &Path) -> Vec<String> {
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_file_is_there_when_it_is_complete_and_replaces_another() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("target");
        fs::write(&target, "old").unwrap();
        for content in ["new", "newer"] {
            let mut file = NewFile::create(&target, &output()).unwrap();
            file.write_all(content.as_bytes()).unwrap();
            assert_ne!(fs::read_to_string(&target).unwrap(), content);
            file.persist().unwrap();
            assert_eq!(fs::read_to_string(&target).unwrap(), content);
            assert_eq!(names(folder.path()), ["target"]);
        }
        // No permission is missing that the umask leaves.
        let other = folder.path().join("other");
        fs::write(&other, "").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&target), mode(&other));
    }

    #[test]
    fn a_file_that_is_dropped_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = NewFile::create(&folder.path().join("target"), &output()).unwrap();
        file.write_all(b"part").unwrap();
        drop(file);
        assert!(names(folder.path()).is_empty());
    }

    #[test]
    fn a_file_that_cannot_be_named_is_copied() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"data").unwrap();
        assert_eq!(fs::read(copy(&mut file, folder.path()).unwrap()).unwrap(), b"data");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn an_incomplete_file_has_no_name() {
        let folder = tempfile::tempdir().unwrap();
        // Some file systems have no files without a name.
        if unnamed(folder.path()).is_some() {
            let _file = NewFile::create(&folder.path().join("target"), &output()).unwrap();
            assert!(names(folder.path()).is_empty());
        }
    }
}
