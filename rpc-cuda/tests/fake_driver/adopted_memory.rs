//! Tests of memory that another library has allocated, as memory of a device.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use rpc_core::device::{DeviceApi, Memory};
use rpc_core::tensor::Layout;
use rpc_core::{Context, DataType, Device, Devices, LocalSession, Registry, RemoteTensor, Result, Session, Tensor};
use rpc_cuda::CudaDevice;

use crate::fake::with_driver;
use crate::memory_access::{read, write};
use crate::{LIMIT, ReleaseOnDrop, allocate, of, pattern, stream, until_waited};

/// Memory that a library has allocated, with a report of its release.
struct Lent {
    memory: Box<dyn Memory>,
    end: mpsc::Sender<()>,
}

impl Lent {
    fn new(memory: Box<dyn Memory>) -> (Self, mpsc::Receiver<()>) {
        let (end, ended) = mpsc::channel();
        (Self { memory, end }, ended)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // The receiver may be gone.
        _ = self.end.send(());
    }
}

/// Wraps `owner`'s bytes as memory of a device.
fn adopt(cuda: &CudaDevice, owner: Lent) -> Box<dyn Memory> {
    let (address, len) = (owner.memory.device_address().unwrap(), owner.memory.len() as usize);
    // SAFETY: the bytes belong to the owner, which gives no other access to them, and live until it
    // is dropped.
    unsafe { cuda.adopt(0, address, len, Box::new(owner)).unwrap() }
}

#[test]
fn adopted_memory_is_released_when_submitted_work_is_done() {
    static MAY_GO_ON: AtomicBool = AtomicBool::new(false);
    let name = "adopted_memory::adopted_memory_is_released_when_submitted_work_is_done";
    with_driver(name, &[], &[], |fake| {
        let _end = ReleaseOnDrop(&MAY_GO_ON);
        let cuda = CudaDevice::open().unwrap();
        let side = cuda.create_stream(0).unwrap();
        let memory = allocate(&cuda, 0, 1000);
        write(&*memory, 0, &pattern(1000, 8));
        let (lent, ended) = Lent::new(memory);
        let adopted = adopt(&cuda, lent);
        assert_eq!((adopted.len(), adopted.host().is_none()), (1000, true));
        assert_eq!(read(&*adopted, 0, 1000), pattern(1000, 8));
        write(&*adopted, 10, &[1, 2, 3]);
        assert_eq!(read(&*adopted, 9, 5), [pattern(1000, 8)[9], 1, 2, 3, pattern(1000, 8)[13]]);
        // Work on another stream delays the release, and does not block the drop.
        side.wait_for(&*cuda.default_stream(0).unwrap()).unwrap();
        fake.hold(stream(&side).raw(), &MAY_GO_ON);
        fake.fill(of(&*adopted), 9, 1000, stream(&side));
        let waits = fake.count("fake_host_waits");
        drop(adopted);
        until_waited(fake, waits);
        assert!(ended.try_recv().is_err());
        MAY_GO_ON.store(true, Ordering::SeqCst);
        ended.recv_timeout(LIMIT).unwrap();
        assert_eq!(fake.pending(stream(&side)), 0);
    });
}

#[test]
fn a_session_has_tensors_in_adopted_memory() {
    with_driver("adopted_memory::a_session_has_tensors_in_adopted_memory", &[], &[], |_| {
        let cuda = CudaDevice::open().unwrap();
        let memory = allocate(&cuda, 0, 12);
        write(&*memory, 0, &pattern(12, 1));
        let (lent, ended) = Lent::new(memory);
        let lent = Mutex::new(Some(lent));
        let registry = Registry::new();
        registry.add("borrow", move |context: Context| -> Result<Tensor> {
            let memory = adopt(&cuda, lent.lock().unwrap().take().unwrap());
            let layout = Layout { byte_offset: 4, shape: &[2], strides: None, dtype: DataType::F32 };
            context.adopt(Device::cuda(0), memory, layout)
        });
        let devices = Devices::new().with(Arc::new(cuda));
        let session = Session::new(LocalSession::builder(registry).devices(devices).build());
        let borrow = session.function::<(), RemoteTensor>("borrow").wait().unwrap();
        let tensor = borrow.call(()).wait().unwrap();
        assert_eq!(session.copy_from_remote(&tensor).wait().unwrap()[..], pattern(12, 1)[4..]);
        session.copy_to_remote(&tensor, vec![7; 8]).wait().unwrap();
        assert_eq!(session.copy_from_remote(&tensor).wait().unwrap()[..], [7; 8]);
        assert!(ended.try_recv().is_err());
        drop(tensor);
        ended.recv_timeout(LIMIT).unwrap();
        drop(session);
    });
}
