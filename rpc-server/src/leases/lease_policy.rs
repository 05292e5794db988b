//! Rules for sessions that use a device while another session holds a lease on it.

use std::fmt;
use std::str::FromStr;

use rpc_core::{Device, DeviceType};
use serde::{Deserialize, Serialize};

/// Treatment of requests that use a device while another session holds a lease on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum UnleasedUse {
    /// They run, beside those of the holder.
    #[default]
    Share,
    /// They wait until no other session holds a lease.
    Wait,
    /// They fail.
    Refuse,
}

impl UnleasedUse {
    const ALL: [(&str, Self); 3] = [("share", Self::Share), ("wait", Self::Wait), ("refuse", Self::Refuse)];
}

impl fmt::Display for UnleasedUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL.iter().find(|(_, treatment)| treatment == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

/// Rule for the devices of a kind, or for one of them, written as `cuda=wait` or `cuda:1=refuse`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LeaseRule {
    /// Kind of the devices.
    pub kind: DeviceType,
    /// Index of the one device that the rule is for; `None` for all devices of the kind.
    pub index: Option<i32>,
    /// Treatment of sessions without a lease.
    pub treatment: UnleasedUse,
}

/// Error of a text that is not a rule for sessions without a lease.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a rule for sessions without a lease; write for example cuda=wait, cuda:1=refuse or cpu=share")]
pub struct LeaseRuleError(String);

impl LeaseRule {
    /// Returns the devices of the rule as text.
    pub(crate) fn devices(&self) -> String {
        self.index.map_or_else(|| self.kind.to_string(), |index| Device::new(self.kind, index).to_string())
    }
}

impl FromStr for LeaseRule {
    type Err = LeaseRuleError;

    fn from_str(text: &str) -> Result<Self, LeaseRuleError> {
        let parse = || {
            let (devices, treatment) = text.trim().split_once('=')?;
            let (kind, index) = match devices.contains(':') {
                true => devices.parse().ok().map(|Device { kind, index }| (kind, Some(index)))?,
                false => (devices.parse().ok()?, None),
            };
            let (_, treatment) = UnleasedUse::ALL.into_iter().find(|(name, _)| *name == treatment)?;
            Some(Self { kind, index, treatment })
        };
        parse().ok_or_else(|| LeaseRuleError(text.to_owned()))
    }
}

impl TryFrom<String> for LeaseRule {
    type Error = LeaseRuleError;

    fn try_from(text: String) -> Result<Self, LeaseRuleError> {
        text.parse()
    }
}

impl From<LeaseRule> for String {
    fn from(rule: LeaseRule) -> Self {
        rule.to_string()
    }
}

impl fmt::Display for LeaseRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.devices(), self.treatment)
    }
}

/// Rules of a server. A rule for one device goes before that for its kind; devices without a rule
/// are shared.
#[derive(Clone, Debug, Default)]
pub(crate) struct LeasePolicy(Vec<LeaseRule>);

impl LeasePolicy {
    pub(crate) fn new(rules: &[LeaseRule]) -> Self {
        Self(rules.to_vec())
    }

    /// Returns true if there are devices that are not shared.
    pub(crate) fn restricts(&self) -> bool {
        self.0.iter().any(|rule| rule.treatment != UnleasedUse::Share)
    }

    /// Returns true if sessions share a device with the holder of a lease.
    pub(crate) fn is_shared(&self, device: Device) -> bool {
        self.treatment(device) == UnleasedUse::Share
    }

    pub(crate) fn treatment(&self, device: Device) -> UnleasedUse {
        let of_kind = || self.0.iter().filter(|rule| rule.kind == device.kind);
        let rule = of_kind().find(|rule| rule.index == Some(device.index));
        rule.or_else(|| of_kind().find(|rule| rule.index.is_none()))
            .map_or_else(Default::default, |rule| rule.treatment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_for_one_device_goes_before_that_for_its_kind() {
        let rules = ["cuda=wait", "cuda:1=refuse", "cpu=share", "device99:2=wait"];
        let rules = rules.map(|text| text.parse::<LeaseRule>().map(|rule| (rule.to_string(), rule)).unwrap());
        assert_eq!(rules.clone().map(|(text, _)| text), ["cuda=wait", "cuda:1=refuse", "cpu=share", "device99:2=wait"]);
        let policy = LeasePolicy::new(&rules.map(|(_, rule)| rule));
        for (device, expected) in [
            ("cuda:0", UnleasedUse::Wait),
            ("cuda:1", UnleasedUse::Refuse),
            ("cpu:0", UnleasedUse::Share),
            ("device99:1", UnleasedUse::Share),
            ("device99:2", UnleasedUse::Wait),
            ("vulkan:0", UnleasedUse::Share),
        ] {
            assert_eq!(policy.treatment(device.parse().unwrap()), expected, "{device}");
        }
        assert!(policy.restricts() && !LeasePolicy::new(&["cpu=share".parse().unwrap()]).restricts());
        for bad in ["", "cuda", "cuda=", "=wait", "cuda:=wait", "cuda:-1=wait", "board=wait", "cuda=queue"] {
            assert!(bad.parse::<LeaseRule>().is_err(), "{bad}");
        }
    }
}
