//! Versions of families of messages, such as those of trackers. A peer that speaks another version
//! is refused in words that name the side to update.

use rpc_core::{ErrorKind, Packed, Result, RpcError};
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Messages that change together, and their version in this program.
///
/// The version is raised with every change of the messages' bytes, names of fields and variants
/// included. Fields that readers may skip are no such change. The first message of each exchange
/// has the sender's version in its field `version`; a message without that field has version 1.
#[derive(Clone, Copy, Debug)]
pub struct MessageFamily {
    name: &'static str,
    version: u32,
}

/// The field that each version but the first has.
#[derive(Deserialize)]
struct Versioned {
    #[serde(default = "first_version")]
    version: u32,
}

impl MessageFamily {
    /// Creates a family. Errors call it by `name`, such as "the messages of trackers".
    #[must_use]
    pub const fn new(name: &'static str, version: u32) -> Self {
        Self { name, version }
    }

    /// Returns the version that this program speaks.
    #[must_use]
    pub const fn version(&self) -> u32 {
        self.version
    }

    /// Checks that `peer` speaks the version of this program, which the error calls `own`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::VersionMismatch`], with both versions and the side to update.
    pub fn check(&self, version: u32, peer: &str, own: &str) -> Result<()> {
        let Self { name, version: ours } = self;
        let older = match version.cmp(ours) {
            std::cmp::Ordering::Equal => return Ok(()),
            std::cmp::Ordering::Less => peer,
            std::cmp::Ordering::Greater => own,
        };
        let text = format!("{peer} speaks version {version} of {name}, and {own} version {ours}: update {older}");
        Err(RpcError::new(ErrorKind::VersionMismatch, text))
    }

    /// Decodes a message that `peer` has sent to `own`. The version is read before the other
    /// fields, which may be unknown here.
    ///
    /// # Errors
    ///
    /// Those of [`check`](Self::check); and [`ErrorKind::InvalidArgument`] for other bytes.
    pub fn decode<T: DeserializeOwned>(&self, message: &Packed, peer: &str, own: &str) -> Result<T> {
        let Versioned { version } = message.decode()?;
        self.check(version, peer, own)?;
        message.decode()
    }
}

/// Returns the version of messages without a number.
pub(crate) fn first_version() -> u32 {
    1
}

#[cfg(test)]
mod tests {
    use serde::Serialize;

    use super::*;

    const FAMILY: MessageFamily = MessageFamily::new("the messages of boards", 3);

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Greeting {
        version: u32,
        text: String,
    }

    #[test]
    fn the_older_side_is_the_one_to_update() {
        let read = |message: &Packed| FAMILY.decode::<Greeting>(message, "the board", "this program");
        let greeting = Greeting { version: 3, text: "hello".to_owned() };
        assert_eq!(read(&Packed::encode(&greeting).unwrap()).unwrap(), greeting);

        /// A form that cannot be read as a `Greeting`.
        #[derive(Serialize)]
        struct Other {
            words: Vec<u8>,
            #[serde(skip_serializing_if = "Option::is_none")]
            version: Option<u32>,
        }
        for (version, expected) in [
            (
                None,
                "the board speaks version 1 of the messages of boards, and this program version 3: update the board",
            ),
            (
                Some(2),
                "the board speaks version 2 of the messages of boards, and this program version 3: update the board",
            ),
            (
                Some(4),
                "the board speaks version 4 of the messages of boards, and this program version 3: update this program",
            ),
        ] {
            let error = read(&Packed::encode(&Other { words: vec![1], version }).unwrap()).unwrap_err();
            assert_eq!((error.kind(), error.message()), (ErrorKind::VersionMismatch, expected));
        }
        let error = read(&Packed::encode(&"hello").unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
}
