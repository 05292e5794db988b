//! The real library of collectives for GPUs, where there is one: what needs no GPU of it.
//!
//! `pip install --target FOLDER nvidia-nccl-cu12` gets one (some 300 MB), for
//! `DISCO_NCCL_LIBRARY=FOLDER/nvidia/nccl/lib/libnccl.so.2`.

use std::ffi::c_void;
use std::sync::Arc;

use disco::ccl::nccl::{DeviceStream, Library, Mark, NcclCcl, Options, UniqueId, Version};
use disco::ccl::{Rank, host};
use rpc_core::{Device, ErrorKind, RpcError};

/// Returns the library of this machine, or prints why there is none.
fn library() -> Option<Arc<Library>> {
    Library::load().inspect_err(|error| println!("SKIPPED: {error}")).ok()
}

#[test]
fn the_library_says_what_it_is() {
    let Some(library) = library() else { return };
    println!("found {library}");
    assert!(library.version() >= Version::new(2, 14, 0));
    assert!(library.version().major < 10, "{}", library.version());
    let again = Library::open(library.path()).unwrap();
    assert_eq!(again.version(), library.version());
}

#[test]
fn unique_ids_differ_and_travel() {
    let Some(library) = library() else { return };
    let [one, other] = [(); 2].map(|()| library.unique_id().unwrap());
    assert_ne!(one, other);
    let text = serde_json::to_string(&one).unwrap();
    assert_eq!(serde_json::from_str::<UniqueId>(&text).unwrap(), one);
    assert!(!format!("{one:?}").contains(char::is_numeric));
}

#[test]
fn every_code_has_a_text() {
    let Some(library) = library() else { return };
    let texts: Vec<_> = (0..8).map(|code| library.error_string(code)).collect();
    println!("{texts:?}");
    for (code, text) in texts.iter().enumerate() {
        assert!(!text.is_empty());
        assert_eq!(texts.iter().position(|other| other == text), Some(code), "{text} twice");
    }
    // Whatever a newer or older library makes of these, it is text.
    for code in [8, 9, 1000, -1, i32::MIN] {
        assert!(!library.error_string(code).is_empty());
    }
    println!("last error: {:?}", library.last_error());
}

/// The default stream of whichever device is current, if there is one.
struct DefaultStream;

// SAFETY: nothing is enqueued.
unsafe impl DeviceStream for DefaultStream {
    fn device(&self) -> Device {
        Device::cuda(0)
    }

    fn raw(&self) -> *mut c_void {
        std::ptr::null_mut()
    }

    fn make_current(&self) -> Result<(), RpcError> {
        Ok(())
    }

    fn is_done(&self) -> Result<bool, RpcError> {
        Ok(true)
    }

    fn mark(&self) -> Result<Box<dyn Mark>, RpcError> {
        Err(RpcError::unsupported("this test has no events of a device"))
    }

    fn scratch(&self, _: usize) -> Result<*mut c_void, RpcError> {
        Err(RpcError::unsupported("this test has no memory of a device"))
    }
}

/// Without a GPU the library refuses, and says why; with one it makes a group of one.
#[test]
fn a_group_is_made_or_refused_in_the_librarys_words() {
    let Some(library) = library() else { return };
    let id = library.unique_id().unwrap();
    let control = host::threads(1, &host::Options::default()).unwrap().remove(0);
    match NcclCcl::new(library, id, Rank(0), 1, control, Arc::new(DefaultStream), Options::default()) {
        Ok(ccl) => println!("made {ccl:?}"),
        Err(error) => {
            println!("refused: {error}");
            assert!(error.message().contains("ncclCommInitRankConfig: unhandled cuda error"), "{error}");
        }
    }
}

#[test]
fn libraries_that_cannot_be_loaded_are_listed_with_the_errors_of_the_system() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("libnccl.so.2");
    let error = Library::open(&missing).unwrap_err();
    assert_eq!(error.attempts.len(), 1);
    assert!(error.to_string().contains("No such file"), "{error}");
    std::fs::write(&missing, "no library").unwrap();
    let error = RpcError::from(Library::open(&missing).unwrap_err());
    assert_eq!(error.kind(), ErrorKind::DeviceUnavailable);
    assert!(error.message().contains(missing.to_str().unwrap()), "{error}");
}
