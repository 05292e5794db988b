//! The functions that a session with a server of TVM has beside those of the server, and their
//! names.

/// A function that this side has for its callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientFunction {
    Echo,
    Info,
    Functions,
    Signature,
    TimeFunction,
    BeginWrite,
    WriteFile,
    CommitFile,
    OpenFile,
    ReadFile,
    ListFiles,
    ListFolders,
    RemoveFile,
    SetExecutable,
    FindModule,
    BeginUpload,
    WriteModule,
    CommitModule,
}

const FUNCTIONS: [(ClientFunction, &str); 18] = [
    (ClientFunction::Echo, "rpc.echo"),
    (ClientFunction::Info, "rpc.info"),
    (ClientFunction::Functions, "rpc.functions"),
    (ClientFunction::Signature, "rpc.signature"),
    (ClientFunction::TimeFunction, "rpc.time_function"),
    (ClientFunction::BeginWrite, "rpc.file.begin_write"),
    (ClientFunction::WriteFile, "rpc.file.write"),
    (ClientFunction::CommitFile, "rpc.file.commit"),
    (ClientFunction::OpenFile, "rpc.file.open"),
    (ClientFunction::ReadFile, "rpc.file.read"),
    (ClientFunction::ListFiles, "rpc.file.ls"),
    (ClientFunction::ListFolders, "rpc.file.folders"),
    (ClientFunction::RemoveFile, "rpc.file.rm"),
    (ClientFunction::SetExecutable, "rpc.file.set_executable"),
    (ClientFunction::FindModule, "rpc.module.find"),
    (ClientFunction::BeginUpload, "rpc.module.begin_upload"),
    (ClientFunction::WriteModule, "rpc.module.write"),
    (ClientFunction::CommitModule, "rpc.module.commit"),
];

impl ClientFunction {
    pub(super) fn from_name(name: &str) -> Option<Self> {
        FUNCTIONS.iter().find(|(_, of)| *of == name).map(|(function, _)| *function)
    }

    pub(super) fn name(self) -> &'static str {
        FUNCTIONS.iter().find(|(function, _)| *function == self).map_or("", |(_, name)| *name)
    }
}
