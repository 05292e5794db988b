//! The running program: its arguments, and the command that starts it again.
//!
//! A compiled program is its executable, and its arguments are those of the process. A program that
//! another one runs, such as a script of an interpreter, is neither: `/proc/self/exe` is the
//! interpreter, and the first arguments are the interpreter's. Such a program [says](embed) what
//! its arguments are, and how it is started again. Everything in this project that reads arguments,
//! or starts its own program, asks here.
//!
//! ```
//! use rpc_transports::program::{self, Program};
//!
//! let again = Program::of_command(["/usr/bin/python3", "script.py"]).unwrap();
//! program::embed(["script.py", "--serve-as-child"], again);
//! assert_eq!(program::args().nth(1).unwrap(), "--serve-as-child");
//! let command = Program::this().bare_command()?;
//! assert_eq!(command.get_program(), "/usr/bin/python3");
//! assert_eq!(command.get_args().collect::<Vec<_>>(), ["script.py"]);
//! # Ok::<(), std::io::Error>(())
//! ```

use std::env;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use parking_lot::RwLock;

/// A program that another one runs in this process.
struct Embedded {
    args: Vec<OsString>,
    again: Program,
}

static EMBEDDED: RwLock<Option<Embedded>> = RwLock::new(None);

/// Records that this process runs a program of another one's, with these arguments, its name first;
/// `again` starts it. A later call replaces both.
///
/// `again` must lead to the same hooks: its process calls this function itself, with the arguments
/// that follow the words of `again`.
pub fn embed(args: impl IntoIterator<Item = impl Into<OsString>>, again: Program) {
    let args = args.into_iter().map(Into::into).collect();
    *EMBEDDED.write() = Some(Embedded { args, again });
}

/// Returns true if the program has [said](embed) that another one runs it.
#[must_use]
pub fn is_embedded() -> bool {
    EMBEDDED.read().is_some()
}

/// Returns the arguments of this program, its name first.
pub fn args() -> impl Iterator<Item = OsString> {
    let args = match &*EMBEDDED.read() {
        Some(embedded) => embedded.args.clone(),
        None => env::args_os().collect(),
    };
    args.into_iter()
}

/// A program that can be started: the command without the arguments that say what it is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program(Kind);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    /// The executable of this process.
    Executable,
    /// The words of a command, at least one.
    Command(Vec<OsString>),
}

impl Program {
    /// Returns the running program.
    #[must_use]
    pub fn this() -> Self {
        match &*EMBEDDED.read() {
            Some(embedded) => embedded.again.clone(),
            None => Self(Kind::Executable),
        }
    }

    /// Returns the program that a command starts. `None` if it has no words.
    pub fn of_command(words: impl IntoIterator<Item = impl Into<OsString>>) -> Option<Self> {
        let words: Vec<_> = words.into_iter().map(Into::into).collect();
        (!words.is_empty()).then_some(Self(Kind::Command(words)))
    }

    /// Returns the words of the command, the path of the program first.
    ///
    /// # Errors
    ///
    /// The path of the executable is unknown.
    pub fn words(&self) -> io::Result<Vec<OsString>> {
        match &self.0 {
            Kind::Executable => Ok(vec![env::current_exe()?.into_os_string()]),
            Kind::Command(words) => Ok(words.clone()),
        }
    }

    /// Returns the command, without the check and the marks of
    /// [`self_start::command`](crate::self_start::command): for children that answer at once and
    /// end, before anything else in `main`. It starts the executable of this process even if its
    /// file has been replaced.
    ///
    /// # Errors
    ///
    /// The path of the executable is unknown.
    pub fn bare_command(&self) -> io::Result<Command> {
        Ok(match &self.0 {
            Kind::Executable => {
                let path = executable()?;
                let name = env::args_os().next().unwrap_or_else(|| path.clone().into_os_string());
                let mut command = Command::new(path);
                command.arg0(name);
                command
            }
            Kind::Command(words) => {
                let mut command = Command::new(&words[0]);
                command.args(&words[1..]);
                command
            }
        })
    }
}

/// Returns the path of the running executable, valid even if its file has been replaced.
fn executable() -> io::Result<PathBuf> {
    const RUNNING: &str = "/proc/self/exe";
    if Path::new(RUNNING).exists() { Ok(RUNNING.into()) } else { env::current_exe() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_its_executable_or_a_command() {
        let this = Program::this();
        assert_eq!(this, Program(Kind::Executable));
        assert_eq!(this.words().unwrap(), [env::current_exe().unwrap()]);
        assert_eq!(args().collect::<Vec<_>>(), env::args_os().collect::<Vec<_>>());

        assert_eq!(Program::of_command([] as [&str; 0]), None);
        let script = Program::of_command(["python3", "-m", "module"]).unwrap();
        assert_eq!(script.words().unwrap(), ["python3", "-m", "module"]);
    }
}
