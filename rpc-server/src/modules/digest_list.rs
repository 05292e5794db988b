//! The list of the modules that an operator admits: `--module-digests`.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use rpc_core::client::Digest;
use serde::{Deserialize, Serialize};

use super::ModuleError;

/// Digests of the only modules that may be loaded.
///
/// The file has one digest a line. Text after a space is ignored, such as the file name that
/// `sha256sum` prints; so are empty lines and lines that begin with `#`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DigestList(BTreeSet<Digest>);

/// Maximum number of digests: more than are listed by hand. Each session process gets the list.
const MAX_DIGESTS: usize = 1 << 16;

/// Maximum length of the file: more than that many lines take.
const MAX_BYTES: u64 = 64 << 20;

impl DigestList {
    /// Reads a list. Blocks.
    ///
    /// # Errors
    ///
    /// [`ModuleError::ReadDigests`] and [`ModuleError::Digests`].
    pub fn read(file: &Path) -> Result<Self, ModuleError> {
        let mut text = String::new();
        let read = File::open(file).and_then(|opened| opened.take(MAX_BYTES + 1).read_to_string(&mut text));
        let read = read.and_then(|len| {
            if len as u64 > MAX_BYTES { Err(io::Error::from(io::ErrorKind::FileTooLarge)) } else { Ok(()) }
        });
        read.map_err(|source| ModuleError::ReadDigests { file: file.to_owned(), source })?;
        Self::parse(&text).map_err(|(line, problem)| ModuleError::Digests { file: file.to_owned(), line, problem })
    }

    /// Returns true if the module is on the list.
    pub fn admits(&self, digest: &Digest) -> bool {
        self.0.contains(digest)
    }

    fn parse(text: &str) -> Result<Self, (usize, String)> {
        let mut digests = BTreeSet::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            // sha256sum writes a backslash before the digest if it has escaped the file name.
            let word = line.strip_prefix('\\').unwrap_or(line).split_whitespace().next().unwrap_or_default();
            let digest = word.parse().map_err(|error: rpc_core::client::DigestError| (number, error.to_string()))?;
            digests.insert(digest);
            if digests.len() > MAX_DIGESTS {
                return Err((number, format!("there are more than {MAX_DIGESTS} digests")));
            }
        }
        Ok(Self(digests))
    }
}

impl FromIterator<Digest> for DigestList {
    fn from_iter<I: IntoIterator<Item = Digest>>(digests: I) -> Self {
        Self(digests.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_sha256sum_and_edited_lists_are_read() {
        let (a, b, c) = ("a".repeat(64), "B".repeat(64), "c".repeat(64));
        let text = format!("# ours\n\n{a}  kernels.so\r\n  {b}\n\\{c} *odd\\nname.so\n{a}\n# {}\n", "d".repeat(64));
        let list = DigestList::parse(&text).unwrap();
        assert_eq!(list, [a, b, c].iter().map(|text| text.parse::<Digest>().unwrap()).collect());
        assert!(!list.admits(&"d".repeat(64).parse().unwrap()));
        assert_eq!(DigestList::parse(""), Ok(DigestList::default()));
    }

    #[test]
    fn a_malformed_line_is_reported_by_its_number() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("digests");
        std::fs::write(&file, format!("{}\n\n{}\n", "a".repeat(64), "a".repeat(63))).unwrap();
        let error = DigestList::read(&file).unwrap_err();
        assert!(matches!(error, ModuleError::Digests { line: 3, .. }), "{error:?}");
        assert!(error.to_string().contains("line 3") && error.to_string().contains("64 hexadecimal"), "{error}");
        let error = DigestList::read(&folder.path().join("none")).unwrap_err();
        assert!(matches!(error, ModuleError::ReadDigests { .. }), "{error:?}");
    }
}
