//! What there is to place things on.

use crate::client::session::Session;
use crate::device::DeviceAttribute;
use crate::device::virtual_device::DeviceDescription;
use crate::dlpack::{Device, DeviceType};
use crate::error::Result;
use crate::value::Value;

/// The most devices of one kind that a session is asked for.
const MAX_DEVICES: i32 = 1024;

/// A session, by the name that constraints have for it, and its devices. Those that are preferred come first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// The name.
    pub name: String,
    /// The devices.
    pub devices: Vec<DeviceDescription>,
}

impl Site {
    /// A site with these devices.
    pub fn new(name: &str, devices: Vec<DeviceDescription>) -> Self {
        Self { name: name.to_owned(), devices }
    }

    /// A site with all devices that the session has, of the kinds that have a name.
    ///
    /// # Errors
    ///
    /// Whatever ends the session; a device that describes itself by what is no target.
    pub async fn of(name: &str, session: &Session) -> Result<Self> {
        let mut devices = Vec::new();
        for kind in DeviceType::KNOWN {
            for index in 0..MAX_DEVICES {
                let device = Device::new(*kind, index);
                if session.attribute(device, DeviceAttribute::Exists).concurrent().await? != Value::Bool(true) {
                    break;
                }
                devices.push(describe(session, device).await?);
            }
        }
        Ok(Self::new(name, devices))
    }
}

async fn describe(session: &Session, device: Device) -> Result<DeviceDescription> {
    let ask = |attribute| session.attribute(device, attribute).concurrent();
    let target = ask(DeviceAttribute::Target).await?;
    DeviceDescription::from_attributes(device, target, ask(DeviceAttribute::MemoryScopes).await?)
}
