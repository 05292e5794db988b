//! Object files of clients, linked to a shared library by the compiler of the system: a file `*.o`,
//! or a `*.tar` of such files, as TVM exports models.
//!
//! Linking runs the client's code no more than loading it does: both are for clients who may run
//! native code. It needs no other right, and takes place beside the files of the session's
//! workspace, in a folder of its own. If the process is killed meanwhile, that folder goes with the
//! workspace.

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use flate2::read::GzDecoder;
use rpc_core::Context;
use tempfile::TempDir;

use super::ModuleError;
use crate::config::ByteSize;
use crate::workspace::Workspace;

/// Programs that link, the first one that there is.
const LINKERS: [&str; 3] = ["c++", "cc", "gcc"];

/// Time that a linker has.
const TIME_LIMIT: Duration = Duration::from_secs(120);

/// Interval at which the end of the linker, and of the wait for it, is looked for.
const POLL: Duration = Duration::from_millis(10);

/// Maximum number of files of an archive.
const MAX_OBJECTS: usize = 1024;

/// Length in bytes of what a linker has said that an error shows.
const SHOWN: u64 = 2000;

/// Length of a block of an archive in bytes.
const BLOCK: u64 = 512;

/// First bytes of an archive that is compressed, as TVM writes them.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Returns true if the file has to be linked before it is loaded.
pub(super) fn has_to_be_linked(path: &str) -> bool {
    path.ends_with(".o") || path.ends_with(".tar")
}

/// A library that was linked. Its folder is removed with it.
pub(super) struct LinkedLibrary {
    pub(super) file: File,
    _folder: TempDir,
}

/// Links `file` of the workspace, which has the name `path`. Its objects may have `limit` bytes
/// together. Blocks.
///
/// # Errors
///
/// [`ModuleError::Archive`], [`ModuleError::TooLarge`], [`ModuleError::NoLinker`],
/// [`ModuleError::Link`], and errors of the system.
pub(super) fn link(
    context: &Context,
    workspace: &Workspace,
    path: &str,
    file: &File,
    limit: u64,
) -> Result<LinkedLibrary, ModuleError> {
    // Not among the unfinished files, of which each session of a named workspace removes folders.
    let beside = workspace.path().parent().unwrap_or(workspace.path());
    let folder = tempfile::Builder::new().prefix("link-").tempdir_in(beside)?;
    let len = file.metadata()?.len();
    if len > limit {
        return Err(ModuleError::TooLarge { len, limit: ByteSize(limit) });
    }
    let mut input = file;
    input.rewind()?;
    let objects = if path.ends_with(".tar") {
        let mut first = [0; 2];
        let is_compressed = input.read_exact(&mut first).is_ok() && first == GZIP;
        input.rewind()?;
        if is_compressed {
            unpack(path, &mut GzDecoder::new(BufReader::new(input)).take(limit), folder.path())?
        } else {
            unpack(path, &mut BufReader::new(input).take(limit), folder.path())?
        }
    } else {
        vec![copy_object(&mut input.take(limit), folder.path(), 0)?]
    };
    let library = folder.path().join("linked.so");
    run_linker(context, folder.path(), &objects, &library)?;
    Ok(LinkedLibrary { file: File::open(library)?, _folder: folder })
}

fn copy_object(input: &mut impl Read, folder: &Path, at: usize) -> io::Result<PathBuf> {
    // Names of the client are used for nothing.
    let path = folder.join(format!("{at}.o"));
    io::copy(input, &mut File::create_new(&path)?)?;
    Ok(path)
}

/// Copies the object files of an archive to `folder`. The archive's length, once it is unpacked,
/// bounds theirs.
fn unpack(path: &str, archive: &mut impl Read, folder: &Path) -> Result<Vec<PathBuf>, ModuleError> {
    let broken = |problem: String| ModuleError::Archive { path: path.to_owned(), problem };
    let failed = |error: io::Error| match error.kind() {
        // Errors of what unpacks it.
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => {
            broken(error.to_string())
        }
        _ => error.into(),
    };
    let mut objects = Vec::new();
    let mut header = [0; BLOCK as usize];
    loop {
        match archive.read_exact(&mut header) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
            read => read.map_err(failed)?,
        }
        if header == [0; BLOCK as usize] {
            break;
        }
        let entry = Entry::parse(&header).map_err(&broken)?;
        let padded =
            entry.len.checked_next_multiple_of(BLOCK).ok_or_else(|| broken("a length overflows".to_owned()))?;
        let mut content = archive.take(padded);
        match entry.kind {
            b'0' | 0 if entry.name.ends_with(".o") => {
                if objects.len() >= MAX_OBJECTS {
                    return Err(broken(format!("it has more than {MAX_OBJECTS} files")));
                }
                let object = copy_object(&mut (&mut content).take(entry.len), folder, objects.len()).map_err(failed)?;
                if fs::metadata(&object)?.len() != entry.len {
                    return Err(broken(format!("it ends within {:?}", entry.name)));
                }
                objects.push(object);
            }
            // Folders, and attributes of what follows.
            b'5' | b'x' | b'g' | b'L' => {}
            _ => return Err(broken(format!("{:?} in it is no object file (.o)", entry.name))),
        }
        io::copy(&mut content, &mut io::sink()).map_err(failed)?;
    }
    if objects.is_empty() {
        return Err(broken("there is no object file in it".to_owned()));
    }
    Ok(objects)
}

/// Header of a file in an archive.
struct Entry {
    name: String,
    len: u64,
    kind: u8,
}

impl Entry {
    fn parse(header: &[u8; BLOCK as usize]) -> Result<Self, String> {
        let text = |from: usize, to: usize| {
            let field = &header[from..to];
            let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
            String::from_utf8_lossy(&field[..end]).into_owned()
        };
        let octal = |from, to| {
            let digits = text(from, to);
            u64::from_str_radix(digits.trim(), 8).map_err(|_| format!("{digits:?} is no number of an archive"))
        };
        // Its own field counts as blanks.
        let sum =
            header.iter().enumerate().map(|(at, &byte)| u64::from(if (148..156).contains(&at) { b' ' } else { byte }));
        if octal(148, 156)? != sum.sum::<u64>() {
            return Err("it is no archive of tar, or damaged".to_owned());
        }
        Ok(Self { name: text(0, 100), len: octal(124, 136)?, kind: header[156] })
    }
}

fn run_linker(context: &Context, folder: &Path, objects: &[PathBuf], library: &Path) -> Result<(), ModuleError> {
    let log = folder.join("log");
    let start = Instant::now();
    for linker in LINKERS {
        let mut command = Command::new(linker);
        command.args(["-shared", "-fPIC", "-o"]).arg(library).args(objects).env("TMPDIR", folder).env("LC_ALL", "C");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log)?);
        let mut child = match command.spawn() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            spawned => spawned?,
        };
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if context.is_cancelled() || start.elapsed() > TIME_LIMIT {
                child.kill()?;
                child.wait()?;
                return Err(ModuleError::Link { linker, said: "it was stopped before its end".to_owned() });
            }
            std::thread::sleep(POLL);
        };
        if status.success() {
            return Ok(());
        }
        let mut said = Vec::new();
        File::open(&log)?.take(SHOWN).read_to_end(&mut said)?;
        // The folder means nothing to the client.
        let said = String::from_utf8_lossy(&said).replace(&format!("{}/", folder.display()), "");
        return Err(ModuleError::Link { linker, said: format!("{status}: {}", said.trim()) });
    }
    Err(ModuleError::NoLinker)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an archive with one file.
    fn archive(name: &str, kind: u8, content: &[u8]) -> Vec<u8> {
        let mut header = [0; BLOCK as usize];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[124..135].copy_from_slice(format!("{:011o}", content.len()).as_bytes());
        header[156] = kind;
        header[148..156].fill(b' ');
        let sum: u64 = header.iter().map(|&byte| u64::from(byte)).sum();
        header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        let mut archive = [&header[..], content].concat();
        archive.resize(archive.len().next_multiple_of(BLOCK as usize), 0);
        archive
    }

    fn unpacked(archive: &[u8]) -> Result<Vec<Vec<u8>>, String> {
        let folder = tempfile::tempdir().unwrap();
        let objects = unpack("x.tar", &mut &archive[..], folder.path()).map_err(|error| error.to_string())?;
        Ok(objects.iter().map(|path| fs::read(path).unwrap()).collect())
    }

    #[test]
    fn the_object_files_of_an_archive_are_unpacked_under_names_of_our_own() {
        let all = [
            archive("folder/", b'5', b""),
            archive("../../escape.o", b'0', b"first"),
            archive("paxheader", b'x', &[7; 600]),
            archive("/absolute.o", 0, &[9; 512]),
            vec![0; 1024],
            b"behind the end".to_vec(),
        ];
        assert_eq!(unpacked(&all.concat()), Ok(vec![b"first".to_vec(), vec![9; 512]]));
        // Without the blocks that end it.
        assert_eq!(unpacked(&archive("a.o", b'0', b"x")), Ok(vec![b"x".to_vec()]));
    }

    #[test]
    fn other_archives_are_errors() {
        let mut damaged = archive("a.o", b'0', b"x");
        damaged[0] = b'b';
        let mut cut = archive("a.o", b'0', &[1; 2000]);
        cut.truncate(1000);
        let link = archive("a.o", b'2', b"");
        for (archive, expected) in [
            (vec![], "no object file"),
            (vec![0; 1024], "no object file"),
            (b"MZ".repeat(400), "no number"),
            (damaged, "damaged"),
            (cut, "ends within"),
            (link, "is no object file"),
            (archive("script.sh", b'0', b"x"), "is no object file"),
            ((0..=MAX_OBJECTS).flat_map(|_| archive("a.o", b'0', b"")).collect(), "more than 1024"),
        ] {
            let error = unpacked(&archive).unwrap_err();
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }
}
