//! Targets: the platform that code for a device is compiled for, as a kind and its attributes.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::dlpack::DeviceType;
use crate::error::{Result, RpcError};

/// Kinds that are not named like their device type, with TVM's names.
const KINDS: [(&str, DeviceType); 4] =
    [("llvm", DeviceType::CPU), ("c", DeviceType::CPU), ("nvptx", DeviceType::CUDA), ("gpu", DeviceType::CUDA)];

/// Platform that code is compiled for: a kind, which determines the type of device that it runs on,
/// and attributes such as the architecture.
///
/// Written like TVM's targets, `cuda -arch=sm_90 -max_threads_per_block=1024`: the kind, then
/// attributes in the order of their names. A kind that is neither one of TVM's nor a device type
/// names its device type, as in `npu@ext_dev -rev=2`. Kind and attributes contain no white space.
/// Two targets are equal if kind, device type and attributes are.
///
/// ```
/// use rpc_core::{DeviceType, Target};
///
/// let target: Target = "cuda -arch=sm_90".parse()?;
/// assert_eq!(target, Target::new("cuda")?.with("arch", "sm_90")?);
/// assert_eq!(target.device_type(), DeviceType::CUDA);
/// # Ok::<(), rpc_core::RpcError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Target {
    kind: String,
    device_type: DeviceType,
    attributes: BTreeMap<String, String>,
}

impl Target {
    /// Creates a target of a known kind: `llvm`, `c`, `nvptx`, or the name of a [`DeviceType`].
    ///
    /// # Errors
    ///
    /// The kind is not known.
    pub fn new(kind: &str) -> Result<Self> {
        let device_type = device_type_of(kind).ok_or_else(|| {
            RpcError::invalid_argument(format!("unknown kind of target '{kind}'; write {kind}@cpu if it runs on cpu"))
        })?;
        Self::on(kind, device_type)
    }

    /// Creates a target of any kind that runs on devices of this type.
    ///
    /// # Errors
    ///
    /// The kind is empty, contains white space, control characters or `@`, or begins with `-`; or a
    /// known kind that runs on another type of device.
    pub fn on(kind: &str, device_type: DeviceType) -> Result<Self> {
        if !is_word(kind) || kind.starts_with('-') || kind.contains('@') {
            return Err(RpcError::invalid_argument(format!("'{}' cannot be a kind of target", kind.escape_debug())));
        }
        match device_type_of(kind) {
            Some(known) if known != device_type => {
                Err(RpcError::invalid_argument(format!("targets of kind {kind} run on {known}, not on {device_type}")))
            }
            _ => Ok(Self { kind: kind.to_owned(), device_type, attributes: BTreeMap::new() }),
        }
    }

    /// Returns the target of devices that report none: `llvm` for processors, otherwise a kind
    /// named like the type; without attributes.
    pub fn of_device(device_type: DeviceType) -> Self {
        let kind = if device_type == DeviceType::CPU { "llvm".to_owned() } else { device_type.to_string() };
        Self { kind, device_type, attributes: BTreeMap::new() }
    }

    /// Sets an attribute, replacing an earlier value.
    ///
    /// # Errors
    ///
    /// A name or value that is empty or contains white space or control characters; a name with
    /// `=`.
    pub fn with(mut self, name: &str, value: &str) -> Result<Self> {
        if !is_word(name) || name.contains('=') || !is_word(value) {
            let (name, value) = (name.escape_debug(), value.escape_debug());
            return Err(RpcError::invalid_argument(format!("'-{name}={value}' cannot be an attribute of a target")));
        }
        self.attributes.insert(name.to_owned(), value.to_owned());
        Ok(self)
    }

    /// Returns the kind, such as `cuda` or `llvm`.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Returns the type of devices that the code runs on.
    pub fn device_type(&self) -> DeviceType {
        self.device_type
    }

    /// Returns the value of an attribute.
    pub fn attribute(&self, name: &str) -> Option<&str> {
        self.attributes.get(name).map(String::as_str)
    }

    /// Returns all attributes, in the order of their names.
    pub fn attributes(&self) -> impl Iterator<Item = (&str, &str)> {
        self.attributes.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// Returns true if this target is of the same kind as `wanted`, with at least the same
    /// attributes.
    pub fn provides(&self, wanted: &Self) -> bool {
        (&self.kind, self.device_type) == (&wanted.kind, wanted.device_type)
            && wanted.attributes().all(|(name, value)| self.attribute(name) == Some(value))
    }
}

fn device_type_of(kind: &str) -> Option<DeviceType> {
    let special = KINDS.iter().find(|(name, _)| *name == kind).map(|(_, device_type)| *device_type);
    // Only names count: `device77` parses as a device type and is no kind of target.
    special.or_else(|| kind.parse::<DeviceType>().ok().filter(|device_type| device_type.name() == Some(kind)))
}

fn is_word(text: &str) -> bool {
    !text.is_empty() && !text.contains(|c: char| c.is_whitespace() || c.is_control())
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.kind)?;
        if device_type_of(&self.kind).is_none() {
            write!(f, "@{}", self.device_type)?;
        }
        self.attributes().try_for_each(|(name, value)| write!(f, " -{name}={value}"))
    }
}

impl FromStr for Target {
    type Err = RpcError;

    fn from_str(text: &str) -> Result<Self> {
        let mut words = text.split_ascii_whitespace();
        let kind = words.next().ok_or_else(|| RpcError::invalid_argument("a target without a kind"))?;
        let target = match kind.split_once('@') {
            Some((kind, device_type)) => Self::on(kind, device_type.parse()?)?,
            None => Self::new(kind)?,
        };
        words.try_fold(target, |target, word| {
            let attribute = word.strip_prefix('-').and_then(|word| word.split_once('='));
            let (name, value) = attribute.ok_or_else(|| {
                RpcError::invalid_argument(format!(
                    "'{word}' in target '{text}' is no attribute, which is written -name=value"
                ))
            })?;
            if target.attribute(name).is_some() {
                return Err(RpcError::invalid_argument(format!("target '{text}' has -{name} twice")));
            }
            target.with(name, value)
        })
    }
}

impl Serialize for Target {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Target {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        for text in [
            "cuda",
            "llvm -mcpu=znver4 -num-cores=8",
            "npu@ext_dev -rev=2",
            "npu@device77",
            "c",
            "nvptx -mattr=+ptx80,+sm",
        ] {
            let target: Target = text.parse().unwrap();
            assert_eq!(target.to_string(), text);
            let bytes = rmp_serde::to_vec_named(&target).unwrap();
            assert_eq!(rmp_serde::from_slice::<Target>(&bytes).unwrap(), target);
        }
        assert_eq!("cuda  -b=1 -a=2".parse::<Target>().unwrap().to_string(), "cuda -a=2 -b=1");
    }

    #[test]
    fn malformed_targets_are_refused_with_a_reason() {
        for (text, part) in [
            ("", "without a kind"),
            (" ", "without a kind"),
            ("npu", "write npu@cpu"),
            ("device77", "unknown kind"),
            ("cuda arch=sm_90", "'arch=sm_90' in target"),
            ("cuda -arch", "is no attribute"),
            ("cuda -arch=", "cannot be an attribute"),
            ("cuda -=1", "cannot be an attribute"),
            ("cuda -a=1 -a=2", "-a twice"),
            ("cuda@cpu", "run on cuda, not on cpu"),
            ("npu@nowhere", "unknown device kind"),
            ("@cpu", "cannot be a kind"),
        ] {
            let error = text.parse::<Target>().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        assert!(Target::on("a b", DeviceType::CPU).is_err());
        assert!(Target::new("cuda").unwrap().with("a", "b\u{0}").is_err());
    }

    #[test]
    fn more_attributes_provide_fewer() {
        let parse = |text: &str| text.parse::<Target>().unwrap();
        assert!(parse("cuda -a=1 -b=2").provides(&parse("cuda -a=1")));
        assert!(!parse("cuda -a=1").provides(&parse("cuda -a=2")));
        assert!(!parse("cuda").provides(&parse("cuda -a=1")));
        assert!(!parse("nvptx").provides(&parse("cuda")));
    }
}
