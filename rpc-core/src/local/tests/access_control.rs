//! Rights of a session's client: the checks of the session itself, and those inside of functions.

use std::any::Any;

use super::*;
use crate::access_control::Permission;
use crate::client::Session;
use crate::device::CpuDevice;
use crate::dlpack::DataType;
use crate::function::convert::IntoArg;
use crate::function::loader::FunctionModule;

/// Rights that are written out.
#[derive(Debug)]
struct Listed(Vec<String>);

impl AccessControl for Listed {
    fn check(&self, permission: &Permission<'_>) -> Result<()> {
        let text = permission.to_string();
        if self.0.contains(&text) {
            return Ok(());
        }
        Err(RpcError::new(ErrorKind::Refused, format!("not {text}")))
    }

    fn to_text(&self) -> Option<String> {
        None
    }

    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

/// Two devices with host memory.
struct TwoDevices(CpuDevice);

const KIND: DeviceType = DeviceType::EXT_DEV;

impl DeviceApi for TwoDevices {
    fn kind(&self) -> DeviceType {
        KIND
    }

    fn count(&self) -> Result<i32> {
        Ok(2)
    }

    fn attribute(&self, _: i32, _: DeviceAttribute) -> Result<Value> {
        Ok(Value::Null)
    }

    fn allocate(&self, _: i32, request: &AllocRequest<'_>) -> Result<Box<dyn Memory>> {
        self.0.allocate(0, request)
    }

    fn create_stream(&self, _: i32) -> Result<Arc<dyn Stream>> {
        self.0.create_stream(0)
    }

    fn default_stream(&self, _: i32) -> Result<Arc<dyn Stream>> {
        self.0.default_stream(0)
    }
}

fn device(index: i32) -> Device {
    Device::new(KIND, index)
}

fn session(rights: &[&'static str]) -> Session {
    let registry = Registry::new();
    registry
        .add("inner", || 1_i64)
        .add("outer", |context: Context, name: String| context.call(&context.function(&name)?, Vec::new()))
        .add("names", |context: Context| context.functions().into_iter().map(|(name, _)| name).collect::<Vec<_>>())
        .add("load", |context: Context| context.load_module("math", None).map(drop))
        .add("allocate", |context: Context, index: i32| context.allocate(device(index), DataType::F32, &[1]).map(drop))
        .add("stream", |context: Context, index: i32| context.stream(device(index)).map(drop))
        .add("described", |context: Context| context.devices().describe().count() as i64)
        .add("make", |context: Context| context.authorize(&Permission::Program("make")));
    registry.add_module(Arc::new(FunctionModule::new("math").add("one", || 1_i64)));
    let devices = Devices::new().with(Arc::new(TwoDevices(CpuDevice::default())));
    let functions = ["outer", "names", "load", "allocate", "stream", "described", "make"];
    let rights = rights.iter().map(|right| (*right).to_owned()).chain(functions.map(|name| format!("call:{name}")));
    let rights = Arc::new(Listed(rights.chain(["device:cpu:0".to_owned()]).collect()));
    Session::new(LocalSession::builder(registry).devices(devices).access_control(rights).build())
}

fn call_text(session: &Session, name: &str, arg: impl IntoArg) -> Result<Value> {
    session.get_function(name).wait()?.call::<Value>((arg,)).wait()
}

fn refused<T: std::fmt::Debug>(outcome: Result<T>, permission: &str) {
    let error = outcome.expect_err(permission);
    assert_eq!(
        (error.kind(), error.message().contains(&format!("not {permission}"))),
        (ErrorKind::Refused, true),
        "{error}"
    );
}

#[test]
fn functions_are_looked_up_by_name_within_the_rights_of_the_client() {
    let session = session(&[]);
    refused(session.get_function("inner").wait(), "call:inner");
    refused(call_text(&session, "outer", "inner"), "call:inner");
    let names = session.get_function("names").wait().unwrap().call::<Vec<String>>(()).wait().unwrap();
    assert!(names.contains(&"outer".to_owned()) && !names.contains(&"inner".to_owned()), "{names:?}");
    let session = self::session(&["call:inner", "call:innar"]);
    assert_eq!(call_text(&session, "outer", "inner").unwrap(), Value::Int(1));
    // The hint of an error names no function that is hidden.
    let absent = |session: &Session| session.get_function("innar").wait().unwrap_err().message().to_owned();
    assert!(absent(&session).contains("did you mean 'inner'?"), "{}", absent(&session));
    let hidden = absent(&self::session(&["call:innar"]));
    assert!(hidden.contains("'innar'") && !hidden.contains("inner"), "{hidden}");
}

#[test]
fn devices_are_used_within_the_rights_of_the_client() {
    let session = session(&["device:ext_dev:1"]);
    let name = device(0).to_string();
    let denied = format!("device:{name}");
    refused(session.alloc(device(0), DataType::F32, &[1]).wait(), &denied);
    refused(session.attribute(device(0), DeviceAttribute::Name).wait(), &denied);
    assert_eq!(session.attribute(device(0), DeviceAttribute::Exists).wait().unwrap(), Value::Bool(false));
    refused(session.create_stream(device(0)).wait(), &denied);
    refused(call_text(&session, "allocate", 0), &denied);
    refused(call_text(&session, "stream", 0), &denied);

    session.alloc(device(1), DataType::F32, &[1]).wait().unwrap();
    session.create_stream(device(1)).wait().unwrap();
    call_text(&session, "allocate", 1).unwrap();
    call_text(&session, "stream", 1).unwrap();
    let described = session.get_function("described").wait().unwrap().call::<i64>(()).wait().unwrap();
    assert_eq!(described, 2, "cpu:0 and the one device that the client may use");
}

#[test]
fn modules_and_programs_are_within_the_rights_of_the_client() {
    let session = session(&[]);
    refused(session.load_module("math").wait(), "modules");
    refused(session.get_function("load").wait().unwrap().call::<()>(()).wait(), "modules");
    refused(session.get_function("make").wait().unwrap().call::<()>(()).wait(), "run:make");
    let session = self::session(&["modules", "run:make"]);
    session.load_module("math").wait().unwrap().function("one").wait().unwrap();
    for name in ["load", "make"] {
        session.get_function(name).wait().unwrap().call::<()>(()).wait().unwrap();
    }
}
