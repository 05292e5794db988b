//! Programs that clients may run, and their environment, as the operator says.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use rpc_core::client::RunRequest;
use rpc_core::{ErrorKind, Result, RpcError};

use crate::config::ServeConfig;

/// Value of `--allow-run` that allows all programs, those of the workspace included.
pub const ANY_PROGRAM: &str = "any";

/// Search path of programs where the server itself has none.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// Variables that any client may set: numbers of a program that is run for each worker of a Disco
/// session, by the names that launchers of such programs use.
const RANK_VARIABLES: [&str; 4] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];

/// Programs that clients may run, and the environment that they get.
#[derive(Clone)]
pub(crate) struct RunPolicy {
    allowed: Vec<String>,
    /// Variables of the operator, by name.
    env: BTreeMap<String, OsString>,
    /// Variables that clients may set for a listed program.
    client_env: Vec<String>,
    /// Maximum number of processes of one program.
    pub(super) max_processes: u32,
}

impl RunPolicy {
    /// Returns the policy of a server with these settings, in the environment of this process;
    /// `None` if it runs no programs.
    pub(crate) fn new(config: &ServeConfig) -> Option<Self> {
        if config.allow_run.is_empty() {
            return None;
        }
        let is_passed_on =
            |name: &str| name == "PATH" || name.starts_with("LD_") || config.run_env.iter().any(|other| other == name);
        let named = env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
        let mut env: BTreeMap<_, _> = named.filter(|(name, _)| is_passed_on(name)).collect();
        env.entry("PATH".to_owned()).or_insert_with(|| DEFAULT_PATH.into());
        Some(Self {
            allowed: config.allow_run.clone(),
            env,
            client_env: config.run_client_env.clone(),
            max_processes: config.max_run_processes,
        })
    }

    /// Returns this policy for a client that may run `program` and not all programs.
    pub(crate) fn limited_to(&self, program: &str) -> Self {
        let allowed = if self.allows_any() { vec![program.to_owned()] } else { self.allowed.clone() };
        Self { allowed, ..self.clone() }
    }

    /// Returns the path of the program that `request` names, if it may be run.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`] if the operator does not allow it, [`ErrorKind::NotFound`] if it is
    /// not there.
    pub(super) fn program(&self, request: &RunRequest, workspace: &Path) -> Result<PathBuf> {
        let name = &request.program;
        if !self.allows_any() && !self.allowed.contains(name) {
            return Err(RpcError::new(
                ErrorKind::Refused,
                format!("this server does not run '{name}': its operator allows {}", self.allowed.join(", ")),
            ));
        }
        let found = if name.contains('/') { Some(workspace.join(name)) } else { self.find(name) };
        found.ok_or_else(|| RpcError::not_found(format!("no program '{name}' is in the PATH of the server")))
    }

    /// Returns true if clients may run all programs.
    fn allows_any(&self) -> bool {
        self.allowed.iter().any(|allowed| allowed == ANY_PROGRAM)
    }

    /// Returns the environment of the program.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`] for a variable of `request` that is the operator's, that
    /// clients may not set, or that is malformed.
    pub(super) fn environment(&self, request: &RunRequest, workspace: &Path) -> Result<BTreeMap<String, OsString>> {
        let mut env: BTreeMap<_, OsString> =
            ["HOME", "TMPDIR"].map(|name| (name.to_owned(), workspace.as_os_str().to_owned())).into();
        for (name, value) in &request.env {
            if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
                return Err(RpcError::invalid_argument(format!("{name:?} is no variable of an environment")));
            }
            if name.starts_with("LD_") || self.env.contains_key(name) {
                return Err(RpcError::invalid_argument(format!(
                    "the variable {name} comes from the operator of the server, and not from clients"
                )));
            }
            // Variables such as `PYTHONPATH` make a listed program run the client's code.
            let may_set = self.client_env.contains(name) || RANK_VARIABLES.contains(&name.as_str());
            if !self.allows_any() && !may_set {
                return Err(RpcError::invalid_argument(format!(
                    "clients of this server may not set the variable {name}: its operator names those that they may \
                     set with --run-client-env"
                )));
            }
            env.insert(name.clone(), value.into());
        }
        env.extend(self.env.clone());
        Ok(env)
    }

    /// Looks for an executable file in the absolute folders of the `PATH`.
    fn find(&self, name: &str) -> Option<PathBuf> {
        let is_executable = |path: &PathBuf| {
            path.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
        };
        let folders = env::split_paths(self.env.get("PATH")?).filter(|folder| folder.is_absolute());
        folders.map(|folder| folder.join(name)).find(is_executable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(allowed: &[&str]) -> RunPolicy {
        let env = [("PATH", "relative:/nowhere:/bin"), ("LD_LIBRARY_PATH", "/opt/lib"), ("GPU", "1")];
        let env = env.map(|(name, value)| (name.to_owned(), value.into())).into();
        let allowed = allowed.iter().map(|&name| name.to_owned()).collect();
        RunPolicy { allowed, env, client_env: vec!["MODE".to_owned(), "PATH".to_owned()], max_processes: 1 }
    }

    #[test]
    fn programs_are_those_of_the_operator() {
        let program = |policy: &RunPolicy, name: &str| {
            let request = RunRequest { program: name.to_owned(), ..RunRequest::default() };
            policy.program(&request, Path::new("/folder")).map_err(|error| error.kind())
        };
        let listed = policy(&["sh", "/opt/tool", "relative-tool"]);
        assert_eq!(program(&listed, "sh").unwrap(), Path::new("/bin/sh"));
        assert_eq!(program(&listed, "/opt/tool").unwrap(), Path::new("/opt/tool"));
        for other in ["/bin/sh", "./sh", "tool", "any", ""] {
            assert_eq!(program(&listed, other), Err(ErrorKind::Refused), "{other}");
        }
        assert_eq!(program(&listed, "relative-tool"), Err(ErrorKind::NotFound));
        let any = policy(&[ANY_PROGRAM]);
        assert_eq!(program(&any, "./build/tool").unwrap(), Path::new("/folder/./build/tool"));
        assert_eq!(program(&any, ""), Err(ErrorKind::NotFound));
    }

    /// A client that may run one program only must not make it run others.
    #[test]
    fn a_client_with_one_program_sets_the_variables_of_a_listed_one() {
        let limited = policy(&[ANY_PROGRAM]).limited_to("python3");
        let request = |program: &str, name: &str| RunRequest {
            program: program.to_owned(),
            env: vec![(name.to_owned(), "x".to_owned())],
            ..RunRequest::default()
        };
        let program = |name: &str| limited.program(&request(name, "MODE"), Path::new("/work"));
        assert_eq!(program("sh").unwrap_err().kind(), ErrorKind::Refused);
        let environment = |name: &str| limited.environment(&request("python3", name), Path::new("/work"));
        assert!(environment("MODE").is_ok());
        assert_eq!(environment("PYTHONPATH").unwrap_err().kind(), ErrorKind::InvalidArgument);
        let listed = policy(&["sh", "make"]).limited_to("sh");
        assert_eq!(listed.allowed, ["sh", "make"], "the rights of the client are checked beside the list");
    }

    #[test]
    fn clients_set_the_variables_that_are_theirs() {
        let environment = |allowed: &str, name: &str| {
            let request = RunRequest { env: vec![(name.to_owned(), "x".to_owned())], ..RunRequest::default() };
            policy(&[allowed]).environment(&request, Path::new("/folder"))
        };
        let env = environment(ANY_PROGRAM, "HOME").unwrap();
        let pairs: Vec<_> = env.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        let operators = [("GPU", "1"), ("HOME", "x"), ("LD_LIBRARY_PATH", "/opt/lib")];
        assert_eq!(pairs, [&operators[..], &[("PATH", "relative:/nowhere:/bin"), ("TMPDIR", "/folder")]].concat());
        for name in ["PATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "GPU", "", "A=B", "A\0"] {
            for allowed in [ANY_PROGRAM, "sh"] {
                assert_eq!(environment(allowed, name).unwrap_err().kind(), ErrorKind::InvalidArgument, "{name:?}");
            }
        }
        assert_eq!(environment("python3", "MODE").unwrap()["MODE"], "x");
        assert_eq!(environment("python3", "RANK").unwrap()["RANK"], "x");
        for name in ["PYTHONPATH", "BASH_ENV", "HOME"] {
            let error = environment("python3", name).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.to_string().contains("--run-client-env"), "{error}");
        }
    }
}
