//! The functions that clients of TVM expect at a server beside the registered ones: their names and
//! handles.

/// Size of packets that this server tells. Servers of TVM tell none, or that of a small buffer. So
/// it also says to clients of this project that requests may be on the wire before earlier ones are
/// answered: the server survives a client that vanishes meanwhile.
pub(super) const UNLIMITED_PACKET: i64 = i64::MAX;

/// A function that this server adds for clients of TVM. Its handle is a small number, which needs
/// no memory and is never freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServerFunction {
    Upload,
    Download,
    Remove,
    ListDir,
    WorkPath,
    LoadModule,
    DownloadLinkedModule,
    ModuleGetFunction,
    ImportModule,
    MaxPacketSize,
    TimeEvaluator,
    SystemLibrary,
}

const FUNCTIONS: [(ServerFunction, &str); 12] = [
    (ServerFunction::Upload, "tvm.rpc.server.upload"),
    (ServerFunction::Download, "tvm.rpc.server.download"),
    (ServerFunction::Remove, "tvm.rpc.server.remove"),
    (ServerFunction::ListDir, "tvm.rpc.server.listdir"),
    (ServerFunction::WorkPath, "tvm.rpc.server.workpath"),
    (ServerFunction::LoadModule, "tvm.rpc.server.load_module"),
    (ServerFunction::DownloadLinkedModule, "tvm.rpc.server.download_linked_module"),
    (ServerFunction::ModuleGetFunction, "tvm.rpc.server.ModuleGetFunction"),
    (ServerFunction::ImportModule, "tvm.rpc.server.ImportModule"),
    (ServerFunction::MaxPacketSize, "tvm.rpc.server.GetCRTMaxPacketSize"),
    (ServerFunction::TimeEvaluator, "runtime.RPCTimeEvaluator"),
    (ServerFunction::SystemLibrary, "ffi.SystemLib"),
];

impl ServerFunction {
    pub(super) fn from_name(name: &str) -> Option<Self> {
        FUNCTIONS.iter().find(|(_, of)| *of == name).map(|(function, _)| *function)
    }

    pub(super) fn from_handle(handle: u64) -> Option<Self> {
        let at = usize::try_from(handle.checked_sub(1)?).ok()?;
        FUNCTIONS.get(at).map(|(function, _)| *function)
    }

    /// Returns the handle: the place in the list, from 1 on.
    pub(super) fn handle(self) -> u64 {
        FUNCTIONS.iter().position(|(function, _)| *function == self).map_or(0, |at| at as u64 + 1)
    }

    pub(super) fn name(self) -> &'static str {
        FUNCTIONS.iter().find(|(function, _)| *function == self).map_or("", |(_, name)| *name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each function has its place in the test of what clients make a server hold.
    #[test]
    fn every_function_is_flooded() {
        let floods = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/tests/held_memory/tvm_floods.rs");
        let floods = std::fs::read_to_string(floods).unwrap();
        for (function, name) in FUNCTIONS {
            assert!(floods.contains(&format!("{name:?},")), "{name} has no flood");
            assert_eq!(ServerFunction::from_handle(function.handle()), Some(function));
            assert_eq!(ServerFunction::from_name(name), Some(function));
        }
    }
}
