//! Environment for tests of modules: TVM-FFI, which `tests/modules/prepare.sh` installs, and small
//! modules that are compiled against it.

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use parking_lot::Mutex;
use rpc_tvm::{TvmFfi, TvmFfiOptions};

/// A folder of Python packages, TVM-FFI among them.
#[derive(Debug)]
pub struct Environment {
    packages: PathBuf,
}

/// Returns the environment for a test that needs it. Without TVM-FFI it prints that the test is
/// skipped, and returns `None`.
///
/// # Panics
///
/// There is no TVM-FFI, and `RPC_TESTS_REQUIRE_TVM_FFI` is set.
pub fn environment() -> Option<&'static Environment> {
    let found = find();
    if found.is_none() {
        let message = "there is no TVM-FFI: tests/modules/prepare.sh brings it";
        assert!(std::env::var_os("RPC_TESTS_REQUIRE_TVM_FFI").is_none(), "{message}");
        eprintln!("SKIPPED: {message}");
    }
    found
}

/// Returns the environment, if TVM-FFI is installed.
pub(crate) fn find() -> Option<&'static Environment> {
    static FOUND: OnceLock<Option<Environment>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let found = Environment { packages: folder().join("packages") };
        found.library().is_file().then_some(found)
    });
    found.as_ref()
}

/// Returns the folder of fetched packages and compiled modules.
fn folder() -> PathBuf {
    workspace().join("target/tvm-ffi")
}

fn sources() -> PathBuf {
    workspace().join("tests/modules")
}

/// Returns the root of the checkout that this crate was compiled in.
fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("packages lie in the workspace")
}

impl Environment {
    /// Returns the path of `libtvm_ffi.so`.
    pub fn library(&self) -> PathBuf {
        self.packages.join("tvm_ffi/lib/libtvm_ffi.so")
    }

    /// Returns the path of TVM's runtime, if TVM is installed.
    pub fn tvm_runtime(&self) -> Option<PathBuf> {
        Some(self.packages.join("tvm/lib/libtvm_runtime.so")).filter(|runtime| runtime.is_file())
    }

    /// Returns the folder with the model of `tests/modules/model.py`, compiled by TVM, its inputs
    /// and its output. Without TVM it prints that the test is skipped, and returns `None`.
    ///
    /// # Panics
    ///
    /// There is no TVM, and `RPC_TESTS_REQUIRE_TVM` is set; or the model cannot be compiled.
    pub fn model(&self) -> Option<&'static Path> {
        static FOLDER: OnceLock<Option<tempfile::TempDir>> = OnceLock::new();
        let folder = FOLDER.get_or_init(|| {
            if self.tvm_runtime().is_none() {
                assert!(std::env::var_os("RPC_TESTS_REQUIRE_TVM").is_none(), "there is no TVM");
                eprintln!("SKIPPED: there is no TVM beside TVM-FFI: tests/modules/prepare.sh brings it");
                return None;
            }
            let folder = tempfile::tempdir().expect("there is room for temporary files");
            let script = sources().join("model.py");
            let mut command = Command::new("python3");
            command.env("PYTHONPATH", &self.packages).arg(script).arg(folder.path());
            let status = command.status();
            assert!(status.is_ok_and(|status| status.success()), "cannot compile the model");
            Some(folder)
        });
        folder.as_ref().map(tempfile::TempDir::path)
    }

    /// Returns the command of a script of `tests/python` that uses TVM, and the model of
    /// [`model`](Self::model), by `tvm_model.py`. Without TVM it prints that the test is skipped,
    /// and returns `None`.
    ///
    /// # Panics
    ///
    /// As [`model`](Self::model).
    pub fn script(&self, name: &str) -> Option<Command> {
        let (model, runtime) = (self.model()?, self.tvm_runtime()?);
        let mut command = Command::new("python3");
        command.arg(workspace().join("tests/python").join(name)).env("PYTHONPATH", &self.packages);
        command.env("RPC_TESTS_MODEL", model).env("RPC_TESTS_TVM_FFI", self.library());
        command.env("RPC_TESTS_TVM_RUNTIME", runtime);
        Some(command)
    }

    /// Returns the command of a script of `tests/python` that uses an older version of TVM, such as
    /// `0.25`, without its compiler. Without that version it prints that the test is skipped, and
    /// returns `None`.
    ///
    /// # Panics
    ///
    /// There is no such version, and `RPC_TESTS_REQUIRE_TVM_VERSIONS` names it.
    pub fn script_of_version(&self, version: &str, name: &str) -> Option<Command> {
        let older = folder().join(format!("tvm-{version}"));
        if !older.join("tvm/lib/libtvm_runtime.so").is_file() {
            let required = std::env::var("RPC_TESTS_REQUIRE_TVM_VERSIONS").unwrap_or_default();
            assert!(!required.split_whitespace().any(|required| required == version), "there is no TVM {version}");
            eprintln!("SKIPPED: there is no TVM {version}: tests/modules/prepare.sh brings it");
            return None;
        }
        let path = std::env::join_paths([older, self.packages.clone()]).expect("no colon in a path below target");
        let mut command = Command::new("python3");
        command.arg(workspace().join("tests/python").join(name));
        command.env("PYTHONPATH", path).env("TVM_USE_RUNTIME_LIB", "1");
        Some(command)
    }

    /// Returns `libtvm_ffi.so` and the runtime of an older version of TVM, such as `0.25`, if it is
    /// installed.
    pub fn libraries_of_version(&self, version: &str) -> Option<(PathBuf, PathBuf)> {
        let older = folder().join(format!("tvm-{version}"));
        let libraries = (older.join("tvm_ffi/lib/libtvm_ffi.so"), older.join("tvm/lib/libtvm_runtime.so"));
        (libraries.0.is_file() && libraries.1.is_file()).then_some(libraries)
    }

    /// Compiles the server of `tests/modules/minrpc_server.cc` around the sources of TVM's minimal
    /// runtime, which the package has, and returns its path in `folder`. Without TVM it prints that
    /// the test is skipped, and returns `None`.
    ///
    /// # Panics
    ///
    /// There is no TVM, and `RPC_TESTS_REQUIRE_TVM` is set; or the server cannot be compiled.
    pub fn minimal_server(&self, folder: &Path) -> Option<PathBuf> {
        let minimal = self.packages.join("tvm/src/runtime/rpc/minrpc");
        if !minimal.join("minrpc_server.h").is_file() {
            assert!(
                std::env::var_os("RPC_TESTS_REQUIRE_TVM").is_none(),
                "there are no sources of TVM's minimal runtime"
            );
            eprintln!("SKIPPED: there are no sources of TVM's minimal runtime: tests/modules/prepare.sh brings them");
            return None;
        }
        // The runtime includes `../../support/arena.h`.
        let (includes, support) = (folder.join("include/runtime/rpc"), folder.join("include/support"));
        fs::create_dir_all(&includes).and_then(|()| fs::create_dir_all(&support)).expect("there is room");
        fs::copy(sources().join("minrpc_arena.h"), support.join("arena.h")).expect("there is room");
        let program = folder.join("minrpc_server");
        let mut command = Command::new("c++");
        command.args(["-std=c++17", "-O1"]).arg(sources().join("minrpc_server.cc")).arg("-o").arg(&program);
        let packages = ["tvm/include", "tvm_ffi/include"].map(|include| self.packages.join(include));
        for include in packages.iter().chain([&minimal, &includes]) {
            command.arg("-I").arg(include);
        }
        // Nothing names the runtime, whose functions register themselves.
        command.arg("-Wl,--no-as-needed").args([self.tvm_runtime()?, self.library()]);
        for library in ["tvm/lib", "tvm_ffi/lib"] {
            command.arg(format!("-Wl,-rpath,{}", self.packages.join(library).display()));
        }
        let status = command.status().expect("there is a compiler");
        assert!(status.success(), "cannot compile the server around the minimal runtime");
        Some(program)
    }

    /// Compiles the module of `tests/modules/SOURCE`, unless that has been done already, and
    /// returns its path.
    pub fn compile(&self, source: &str) -> PathBuf {
        self.compile_with(source, &[])
    }

    /// Does the same as [`compile`](Self::compile), with further options of the compiler.
    pub fn compile_with(&self, source: &str, options: &[&str]) -> PathBuf {
        let path = sources().join(source);
        let text = fs::read(&path).expect("the source is there");
        let mut hasher = DefaultHasher::new();
        (&text, &self.packages, options).hash(&mut hasher);
        static COMPILING: Mutex<()> = Mutex::new(());
        let _one_at_a_time = COMPILING.lock();
        let modules = folder().join("modules");
        let compiled = modules.join(format!("{}-{:016x}.so", source.replace('.', "_"), hasher.finish()));
        if compiled.is_file() {
            return compiled;
        }
        fs::create_dir_all(&modules).expect("there is room below target");
        // Other programs may compile the same module at the same time.
        let unfinished = compiled.with_extension(format!("{}.so", std::process::id()));
        let is_c = source.ends_with(".c");
        let (compiler, standard) = if is_c { ("cc", "-std=gnu11") } else { ("c++", "-std=c++17") };
        let status = Command::new(compiler)
            .args([standard, "-shared", "-fPIC", "-O1"])
            .arg("-I")
            .arg(self.packages.join("tvm_ffi/include"))
            .args(options)
            .arg(&path)
            .arg("-o")
            .arg(&unfinished)
            .status()
            .expect("there is a compiler");
        assert!(status.success(), "cannot compile {source}");
        fs::rename(&unfinished, &compiled).expect("both lie in one folder");
        compiled
    }

    /// Returns the loader for this environment, with TVM's runtime if that is installed.
    pub fn tvm_ffi(&self) -> TvmFfi {
        let runtimes = self.tvm_runtime().into_iter().collect();
        TvmFfi::new(TvmFfiOptions { library: Some(self.library()), runtimes, libraries: Vec::new() })
    }
}
