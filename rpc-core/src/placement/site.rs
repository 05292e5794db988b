//! Sites: the sessions and devices that a graph can be placed on.

use crate::client::session::Session;
use crate::device::DeviceAttribute;
use crate::device::virtual_device::DeviceDescription;
use crate::dlpack::{Device, DeviceType};
use crate::error::Result;
use crate::value::Value;

/// Largest number of devices of one kind that are queried.
const MAX_DEVICES: i32 = 1024;

/// A session, by its name in constraints, and its devices in order of preference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// Name of the session.
    pub name: String,
    /// Devices of the session, the preferred ones first.
    pub devices: Vec<DeviceDescription>,
}

impl Site {
    /// Creates a site with these devices.
    pub fn new(name: &str, devices: Vec<DeviceDescription>) -> Self {
        Self { name: name.to_owned(), devices }
    }

    /// Creates a site with all devices of the session whose kinds have a name.
    ///
    /// # Errors
    ///
    /// Errors of the session, and a device whose target cannot be parsed.
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
