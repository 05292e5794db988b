//! The Rust blocks of the documents as documentation tests. `tests/documents.rs` runs the shell
//! blocks.

#![cfg(doctest)]

macro_rules! documents {
    ($($name:ident: $path:literal;)*) => {$(
        #[doc = include_str!(concat!("../../", $path))]
        pub struct $name;
    )*};
}

documents! {
    Readme: "README.md";
    Architecture: "ARCHITECTURE.md";
    Contributing: "CONTRIBUTING.md";
    AddingADevice: "docs/adding-a-device.md";
    Devices: "docs/devices.md";
    Disco: "docs/disco.md";
    Modules: "docs/modules.md";
    Operations: "docs/operations.md";
    Python: "docs/python.md";
    Security: "docs/security.md";
    Transports: "docs/transports.md";
    Tvm: "docs/tvm.md";
    Weights: "docs/weights.md";
    Conformance: "tests/conformance/README.md";
    DiscoCrate: "disco/README.md";
    RpcServer: "rpc-server/README.md";
    RpcTransports: "rpc-transports/README.md";
    RpcWebsocket: "rpc-websocket/README.md";
}
