//! Tests of native modules on the fake driver: what they leave on a device when they return.

use std::sync::Arc;

use rpc_core::{
    DataType, Device, Devices, ErrorKind, Lane, LocalSession, Registry, RemoteFunction, RemoteModule, RemoteTensor,
    Session, TensorView,
};
use rpc_cuda::CudaDevice;

use crate::fake::{Fake, with_driver};
use crate::tvm_ffi::environment;

const LEN: usize = 5000;

/// A session with a device and a module that works there.
struct Fixture {
    session: Session,
    module: RemoteModule,
}

impl Fixture {
    fn new(source: &str) -> Self {
        let registry = Registry::new();
        registry.add_loader(Arc::new(environment().unwrap().tvm_ffi()));
        registry.add("first_byte", |bytes: TensorView| -> rpc_core::Result<u8> { Ok(bytes.bytes()?[0]) });
        let devices = Devices::new().with(Arc::new(CudaDevice::open().unwrap()));
        let session = Session::new(LocalSession::builder(registry).devices(devices).build());
        let module = session.load_module(source).wait().unwrap();
        Self { session, module }
    }

    fn function(&self, name: &str) -> RemoteFunction {
        self.module.function(name).wait().unwrap()
    }

    fn bytes(&self, scope: Option<&str>) -> RemoteTensor {
        self.session.alloc_in_scope(Device::cuda(0), DataType::U8, &[LEN as i64], scope).wait().unwrap()
    }

    fn read(&self, tensor: &RemoteTensor) -> Vec<u8> {
        self.session.copy_from_remote(tensor).wait().unwrap().to_vec()
    }
}

/// Runs `body` with the module of `tests/modules/device.c`, where there is TVM-FFI.
fn with_module(test: &str, body: impl FnOnce(&Fake, Fixture)) {
    let Some(environment) = environment() else { return };
    let module = environment.compile("device.c");
    with_driver(test, &[], &[], |fake| body(fake, Fixture::new(module.to_str().unwrap())));
}

/// Regression: the borrow of pinned memory ended while the device was still writing there.
#[test]
fn pinned_memory_is_ready_for_the_processor_when_a_native_function_returns() {
    let name = "native_modules::pinned_memory_is_ready_for_the_processor_when_a_native_function_returns";
    with_module(name, |fake, fixture| {
        let (fill, pinned) = (fixture.function("fill"), fixture.bytes(Some("host")));
        fill.call::<()>((&pinned, 7)).wait().unwrap();
        assert_eq!(fixture.read(&pinned), [7; LEN]);
        // Also on the stream of a lane, and for a function that it calls back.
        let stream = fixture.session.create_stream(Device::cuda(0)).wait().unwrap();
        fixture.session.set_stream(Device::cuda(0), Some(&stream)).lane(Lane(1)).wait().unwrap();
        fill.call::<()>((&pinned, 8)).lane(Lane(1)).wait().unwrap();
        assert_eq!(fixture.read(&pinned), [8; LEN]);
        let first_byte = fixture.session.get_function("first_byte").wait().unwrap();
        assert_eq!(fill.call::<i64>((&pinned, 9, &first_byte)).lane(Lane(1)).wait().unwrap(), 9);
        // Work on a device's own memory goes on after the call.
        let own = fixture.bytes(None);
        let waits = fake.count("fake_host_waits");
        fill.call::<()>((&own, 10)).wait().unwrap();
        assert_eq!(fake.count("fake_host_waits"), waits);
        assert_eq!(fixture.read(&own), [10; LEN]);
    });
}

#[test]
fn a_native_function_with_pinned_memory_tells_its_own_trap() {
    with_module("native_modules::a_native_function_with_pinned_memory_tells_its_own_trap", |_, fixture| {
        let error = fixture.function("trap").call::<()>((&fixture.bytes(Some("host")),)).wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
        assert!(error.request_may_have_run(), "{error}");
    });
}
