//! A model that TVM 0.27 has compiled, with the clients and the runtimes of older versions: those
//! are installed without a compiler of their own.

use rpc_server::ServerProcess;

use crate::native_modules::tvm_ffi;

/// Runs the model at servers with this version's runtime, and by clients of this version.
fn runs_with_version(version: &str) {
    let Some(environment) = tvm_ffi::environment() else { return };
    let Some(model) = environment.model() else { return };
    let (Some(_), Some(older), Some(newest)) = (
        environment.script_of_version(version, "tvm_model.py"),
        environment.libraries_of_version(version),
        environment.tvm_runtime().map(|runtime| (environment.library(), runtime)),
    ) else {
        return;
    };
    for (which, (library, runtime)) in [("its own", &older), ("the newest", &newest)] {
        let folder = tempfile::tempdir().unwrap();
        let mut command = crate::server_program();
        command.args(["serve", "--listen", "tcp://127.0.0.1:0", "--exit-with-stdin", "--log-level", "error"]);
        command.arg("--workdir").arg(folder.path()).args(["--tvm", "--key", "board", "--allow-modules", "--tvm-ffi"]);
        command.arg(library).arg("--runtime-library").arg(runtime).env_remove("TVM_FFI_LIBRARY");
        let server = ServerProcess::spawn(command).unwrap();
        let address = server.address().strip_prefix("tcp://").unwrap();
        let older_client = environment.script_of_version(version, "tvm_model.py").unwrap();
        let newest_client = environment.script("tvm_model.py").unwrap();
        for (mut client, of) in [(older_client, version), (newest_client, "0.27")] {
            let output = client.env("RPC_TESTS_MODEL", model).args([address, of]).output().unwrap();
            let texts = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
            assert!(output.status.success(), "a client of {of}, with {which} runtime of {version}: {}", texts.concat());
        }
    }
}

#[test]
fn a_model_runs_with_the_client_and_the_runtime_of_tvm_0_25() {
    runs_with_version("0.25");
}

#[test]
fn a_model_runs_with_the_client_and_the_runtime_of_tvm_0_26() {
    runs_with_version("0.26");
}
