//! Checks of an ELF file before it is loaded: its architecture, its kind, and the functions that it
//! exports.

use std::fs::File;
use std::path::Path;

use object::read::{ReadCache, ReadRef};
use object::{Architecture, FileFlags, Object, ObjectKind, ObjectSymbol};

use rpc_core::error::{ErrorKind, Result, RpcError};

/// Returns the names of the functions that the module exports, sorted.
///
/// # Errors
///
/// [`ErrorKind::InvalidArgument`] for a file that is not an ELF shared library of this machine's
/// architecture, or not a module of TVM-FFI.
pub(super) fn exports(path: &Path) -> Result<Vec<String>> {
    let file = File::open(path)
        .map_err(|error| RpcError::new(ErrorKind::Io, format!("cannot open {}: {error}", path.display())))?;
    let cache = ReadCache::new(file);
    exports_in(&cache)
}

fn exports_in<'a, R: ReadRef<'a>>(data: R) -> Result<Vec<String>> {
    if data.read_bytes_at(0, ELF_MAGIC.len() as u64) != Ok(ELF_MAGIC) {
        return Err(RpcError::invalid_argument("not an ELF file: a module is a shared library (.so)"));
    }
    let broken = |error: object::Error| RpcError::invalid_argument(format!("a damaged ELF file: {error}"));
    let file = object::File::parse(data).map_err(broken)?;
    let (theirs, ours) = (file.architecture(), architecture());
    if ours.is_some_and(|ours| ours != theirs) || file.is_little_endian() != cfg!(target_endian = "little") {
        let endian = if file.is_little_endian() { "little" } else { "big" };
        return Err(RpcError::invalid_argument(format!(
            "built for {theirs:?}, {endian} endian, but this machine is {}: compile it for this target",
            std::env::consts::ARCH
        )));
    }
    // The operating system in the header is not reliable; the kind of file is.
    if file.kind() != ObjectKind::Dynamic || !matches!(file.flags(), FileFlags::Elf { .. }) {
        return Err(RpcError::invalid_argument(format!(
            "an ELF file of kind {:?}, but not a shared library: link it with -shared",
            file.kind()
        )));
    }
    let mut names = Vec::new();
    let mut is_module = false;
    for symbol in file.dynamic_symbols().filter(object::ObjectSymbol::is_definition) {
        let Some(name) = symbol.name().ok().and_then(|name| name.strip_prefix(PREFIX)) else { continue };
        is_module = true;
        let is_function = !name.is_empty() && !BESIDE.iter().any(|beside| name.starts_with(beside));
        if is_function && names.len() < MAX_FUNCTIONS {
            names.push(name.to_owned());
        }
    }
    if !is_module {
        return Err(RpcError::invalid_argument(format!(
            "a shared library without functions for TVM-FFI: it exports no symbol that begins with {PREFIX}"
        )));
    }
    names.sort_unstable();
    Ok(names)
}

fn architecture() -> Option<Architecture> {
    Some(match std::env::consts::ARCH {
        "x86_64" => Architecture::X86_64,
        "x86" => Architecture::I386,
        "aarch64" => Architecture::Aarch64,
        "arm" => Architecture::Arm,
        "riscv64" => Architecture::Riscv64,
        "loongarch64" => Architecture::LoongArch64,
        "powerpc64" => Architecture::PowerPc64,
        "s390x" => Architecture::S390x,
        _ => return None,
    })
}

const ELF_MAGIC: &[u8] = b"\x7fELF";

/// Prefix of the symbols of exported functions.
const PREFIX: &str = "__tvm_ffi_";

/// Names behind the prefix of symbols that are no functions: metadata and documentation of
/// functions, embedded modules and their context.
const BESIDE: [&str; 4] = ["_metadata_", "_doc_", "_library_bin", "_library_ctx"];

/// Largest number of names: as many as fit into one reply.
const MAX_FUNCTIONS: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(bytes: &[u8]) -> String {
        let error = exports_in(bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        error.message().to_owned()
    }

    #[test]
    fn files_that_are_no_library_of_this_machine_are_refused_with_a_reason() {
        assert!(refusal(b"").contains("not an ELF file"));
        assert!(refusal(b"\x7fEL").contains("not an ELF file"));
        assert!(refusal(b"#!/bin/sh\nexit\n").contains("not an ELF file"));
        assert!(refusal(b"\x7fELF\x02\x01\x01").contains("a damaged ELF file"));
        let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        // Position-independent programs are of the same kind as libraries.
        assert!(refusal(&program).contains("no symbol that begins with __tvm_ffi_"), "{}", refusal(&program));
        // Machine 0x1234, at offset 18 of the header. Truncated files must not cause a panic.
        let mut foreign = program.clone();
        foreign[18..20].copy_from_slice(&[0x34, 0x12]);
        assert!(refusal(&foreign).contains("built for"), "{}", refusal(&foreign));
        for len in (0..4096).chain([1 << 14]) {
            refusal(&program[..len.min(program.len())]);
        }
    }
}
