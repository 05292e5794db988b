//! Sizes, durations, port ranges, HTTP addresses and origins of web pages as people write them.
//!
//! A value is one whole number with one unit, in any case, and is printed so that it reads back as
//! the same value: the configuration file depends on that. The crate `bytesize` prints rounded
//! sizes, and reads those beyond 64 bits as the largest one, which would mean "unlimited" here;
//! `humantime` reads `5M` as five months.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use hyper::Uri;
use hyper::http::uri::Scheme;
use serde::{Deserialize, Serialize};

/// Returns a time of this many seconds.
pub(super) fn seconds(seconds: u64) -> Span {
    Span(Duration::from_secs(seconds))
}

/// A number of bytes, written as `64MiB`, `10GB`, `512` or `unlimited`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ByteSize(pub u64);

/// A length of time, written as `200ms`, `30s`, `5m`, `12h` or `30d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Span(pub Duration);

/// TCP ports from the first to the last, written as `9090-9199`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PortRange(pub RangeInclusive<u16>);

/// Address to serve HTTP at, written as `127.0.0.1:9464`, `[::1]:9464` or `localhost:9464`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HttpAddress(pub SocketAddr);

/// The HTTP endpoint of an OpenTelemetry collector, written as `http://127.0.0.1:4318`;
/// `/v1/traces` is added to it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct OtlpEndpoint(String);

/// Origin of web pages, written as browsers send it: `https://console.example`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Origin(String);

/// Error of a text in the wrong form. Each message shows the right form.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnitError {
    /// Not a size.
    #[error("'{0}' is not a size; write for example 64MiB, 10GB, 512 or unlimited")]
    Size(String),
    /// Not a length of time.
    #[error("'{0}' is not a length of time; write for example 200ms, 30s, 5m, 12h or 30d")]
    Span(String),
    /// Not a range of ports.
    #[error("'{0}' is not a range of ports; write for example 9090-9199")]
    Ports(String),
    /// Not an address for HTTP.
    #[error("'{0}' is not an address and a port; write for example 127.0.0.1:9464 or [::1]:9464")]
    Http(String),
    /// Not the endpoint of a collector.
    #[error(
        "'{0}' is not an endpoint for spans; write for example http://127.0.0.1:4318, with http and without a user: a \
         collector on this machine can forward them"
    )]
    Otlp(String),
    /// Not the origin of web pages.
    #[error(
        "'{0}' is not the origin of web pages; write for example https://console.example or http://localhost:8080, \
         with a port if it is not the usual one, and without a path or *"
    )]
    Origin(String),
}

impl ByteSize {
    /// No limit.
    pub const UNLIMITED: Self = Self(u64::MAX);
}

/// Units of sizes, largest first: the first one that divides a size is used to print it.
const SIZES: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("KB", 1_000),
    ("B", 1),
];

const SPANS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

/// Parses a whole number and one of `units`, in any case.
fn parse(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = (text[..digits].parse::<u64>().ok()?, text[digits..].trim());
    let (_, factor) = units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit))?;
    number.checked_mul(*factor)
}

impl FromStr for ByteSize {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        if text.trim().eq_ignore_ascii_case("unlimited") {
            return Ok(Self::UNLIMITED);
        }
        let plain = text.trim().parse().ok();
        plain.or_else(|| parse(text, &SIZES)).map(Self).ok_or_else(|| UnitError::Size(text.to_owned()))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::UNLIMITED {
            return f.write_str("unlimited");
        }
        let exact = SIZES.iter().find(|(_, factor)| self.0 >= *factor && self.0.is_multiple_of(*factor));
        let (unit, factor) = exact.unwrap_or(&("B", 1));
        write!(f, "{}{unit}", self.0 / factor)
    }
}

impl FromStr for Span {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let millis = if text.trim() == "0" { Some(0) } else { parse(text, &SPANS) };
        millis.map(|millis| Self(Duration::from_millis(millis))).ok_or_else(|| UnitError::Span(text.to_owned()))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX);
        let exact = SPANS.iter().find(|(_, factor)| millis > 0 && millis.is_multiple_of(*factor));
        let (unit, factor) = exact.unwrap_or(&("s", 1_000));
        write!(f, "{}{unit}", millis / factor)
    }
}

impl FromStr for PortRange {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let ports = text.split_once('-').and_then(|(first, last)| {
            let (first, last) = (first.trim().parse::<u16>().ok()?, last.trim().parse::<u16>().ok()?);
            (0 < first && first <= last).then_some(first..=last)
        });
        ports.map(Self).ok_or_else(|| UnitError::Ports(text.to_owned()))
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.0.start(), self.0.end())
    }
}

impl FromStr for HttpAddress {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let localhost = text.strip_prefix("localhost:").and_then(|port| port.parse().ok());
        let address = localhost.map(|port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        address.or_else(|| text.parse().ok()).map(Self).ok_or_else(|| UnitError::Http(text.to_owned()))
    }
}

impl fmt::Display for HttpAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

macro_rules! as_text {
    ($($unit:ident)*) => {
        $(
            impl TryFrom<String> for $unit {
                type Error = UnitError;

                fn try_from(text: String) -> Result<Self, UnitError> {
                    text.parse()
                }
            }

            impl From<$unit> for String {
                fn from(unit: $unit) -> Self {
                    unit.to_string()
                }
            }
        )*
    };
}

impl OtlpEndpoint {
    /// Returns the URL to which spans are sent.
    pub fn traces(&self) -> String {
        format!("{}/v1/traces", self.0)
    }
}

impl FromStr for OtlpEndpoint {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let plain = |uri: &Uri| {
            let authority = uri.authority().is_some_and(|authority| !authority.as_str().contains('@'));
            uri.scheme() == Some(&Scheme::HTTP) && authority && uri.query().is_none()
        };
        // A fragment would be dropped without notice.
        let uri = text.parse::<Uri>().ok().filter(|uri| plain(uri) && !text.contains('#'));
        match uri {
            Some(_) => Ok(Self(text.trim_end_matches('/').to_owned())),
            None => Err(UnitError::Otlp(text.to_owned())),
        }
    }
}

impl fmt::Display for OtlpEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Origin {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let is_origin = |uri: &Uri| {
            let has_name = |name: &str| !name.is_empty() && !name.contains(['@', '*']);
            let authority = uri.authority().is_some_and(|authority| has_name(authority.as_str()));
            // `Uri` gives a path of `/` where there is none.
            // Browsers leave out the port that the scheme implies.
            let implied =
                matches!((uri.scheme_str(), uri.port_u16()), (Some("https"), Some(443)) | (Some("http"), Some(80)));
            authority && !implied && uri.scheme().is_some() && uri.query().is_none() && uri.path() == "/"
        };
        let uri = text.parse::<Uri>().ok();
        match uri.filter(|uri| is_origin(uri) && !text.ends_with('/') && !text.contains('#')) {
            Some(_) => Ok(Self(text.to_ascii_lowercase())),
            None => Err(UnitError::Origin(text.to_owned())),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

as_text!(ByteSize Span PortRange HttpAddress OtlpEndpoint Origin);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_any_unit_and_shown_in_the_largest_that_is_exact() {
        for (text, bytes, shown) in [
            ("64MiB", 64 << 20, "64MiB"),
            ("64 mib", 64 << 20, "64MiB"),
            ("1024KiB", 1 << 20, "1MiB"),
            ("10GB", 10_000_000_000, "10GB"),
            ("512", 512, "512B"),
            ("0", 0, "0B"),
            ("unlimited", u64::MAX, "unlimited"),
        ] {
            let size: ByteSize = text.parse().unwrap();
            assert_eq!((size.0, size.to_string().as_str()), (bytes, shown));
            assert_eq!(shown.parse::<ByteSize>().unwrap(), size);
        }
        for bad in ["", "MiB", "-1", "1.5GiB", "12XB", "99999999TiB", "٣MiB"] {
            assert!(bad.parse::<ByteSize>().is_err(), "{bad}");
        }
    }

    #[test]
    fn spans_are_read_in_any_unit_and_shown_in_the_largest_that_is_exact() {
        for (text, millis, shown) in [
            ("200ms", 200, "200ms"),
            ("30s", 30_000, "30s"),
            ("90 S", 90_000, "90s"),
            ("120m", 7_200_000, "2h"),
            ("30d", 2_592_000_000, "30d"),
            ("0", 0, "0s"),
        ] {
            let span: Span = text.parse().unwrap();
            assert_eq!((span.0.as_millis(), span.to_string().as_str()), (millis, shown));
            assert_eq!(shown.parse::<Span>().unwrap(), span);
        }
        for bad in ["", "30", "s", "-1s", "1.5s", "1y", "99999999999999d"] {
            assert!(bad.parse::<Span>().is_err(), "{bad}");
        }
    }

    #[test]
    fn http_addresses_name_a_port_and_no_host_that_would_have_to_be_looked_up() {
        for (text, shown) in [
            ("127.0.0.1:9464", "127.0.0.1:9464"),
            ("localhost:0", "127.0.0.1:0"),
            ("[::1]:9464", "[::1]:9464"),
            ("0.0.0.0:80", "0.0.0.0:80"),
        ] {
            assert_eq!(text.parse::<HttpAddress>().unwrap().to_string(), shown);
        }
        for bad in ["", "9464", ":9464", "127.0.0.1", "::1:9464x", "board.lan:9464", "http://127.0.0.1:1"] {
            assert!(bad.parse::<HttpAddress>().is_err(), "{bad}");
        }
    }

    #[test]
    fn collectors_are_reached_over_plain_http() {
        for (text, traces) in [
            ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
            ("http://[::1]:4318/", "http://[::1]:4318/v1/traces"),
            ("http://collector.lan/otlp", "http://collector.lan/otlp/v1/traces"),
        ] {
            let endpoint: OtlpEndpoint = text.parse().unwrap();
            assert_eq!(endpoint.traces(), traces);
            assert_eq!(endpoint.to_string().parse::<OtlpEndpoint>().unwrap(), endpoint);
        }
        for bad in [
            "",
            "127.0.0.1:4318",
            "https://collector.lan",
            "http://",
            "/v1",
            "http://a/?b",
            "http://u:p@a/",
            "http://a/#b",
        ] {
            assert!(bad.parse::<OtlpEndpoint>().is_err(), "{bad}");
        }
    }

    #[test]
    fn origins_have_a_scheme_and_a_host_and_no_path() {
        for (text, shown) in [
            ("https://console.example", "https://console.example"),
            ("HTTPS://Console.Example:8443", "https://console.example:8443"),
            ("http://[::1]:8080", "http://[::1]:8080"),
            ("chrome-extension://abcdef", "chrome-extension://abcdef"),
        ] {
            let origin: Origin = text.parse().unwrap();
            assert_eq!(origin.to_string(), shown);
            assert_eq!(shown.parse::<Origin>().unwrap(), origin);
        }
        for bad in [
            "",
            "*",
            "null",
            "console.example",
            "https://",
            "https://console.example/",
            "https://console.example/path",
            "https://console.example?q",
            "https://*.example",
            "https://me@console.example",
            "https://console.example#x",
        ] {
            let error = bad.parse::<Origin>().unwrap_err();
            assert!(error.to_string().contains("https://console.example or"), "{error}");
        }
    }

    #[test]
    fn port_ranges_run_upwards_and_leave_zero_out() {
        assert_eq!("9090-9199".parse::<PortRange>().unwrap(), PortRange(9090..=9199));
        assert_eq!("7-7".parse::<PortRange>().unwrap().to_string(), "7-7");
        for bad in ["", "9090", "9199-9090", "0-10", "1-65536", "a-b", "1-2-3"] {
            assert!(bad.parse::<PortRange>().is_err(), "{bad}");
        }
    }
}
