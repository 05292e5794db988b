//! Files of tokens: shared secrets in place of certificates.
//!
//! A file has one [`Token`] a line, in the form that [`Tokens::parse`] reads. During a change of
//! tokens it has two: the server accepts both.

use std::path::{Path, PathBuf};

use rpc_transports::{Token, TokenError, Tokens};

use super::PkiError;
use super::private_file::{Mode, read_if_there, write};

/// Generates a token of 256 random bits for the holder `name`, `token` by default, in the form of a
/// line.
///
/// # Errors
///
/// The name is malformed, or the system provides no random numbers.
pub fn generate(name: Option<&str>) -> Result<String, PkiError> {
    let token = Token::generate()?;
    let line = match name {
        Some(name) => format!("{name} {}", token.secret()),
        None => token.secret().to_owned(),
    };
    // A malformed name could be lost, or be read as another one.
    if line.parse::<Token>()?.name() != name.unwrap_or(token.name()) {
        return Err(TokenError::Name.into());
    }
    Ok(line)
}

/// Writes a file with `token` alone, readable by its owner only.
///
/// # Errors
///
/// [`PkiError::Exists`] if the file exists; or it cannot be written.
pub fn store(token: &str, file: &Path) -> Result<(), PkiError> {
    write(file, &format!("{token}\n"), Mode::PrivateNew).map_err(|error| match error {
        PkiError::Exists { file, .. } => {
            PkiError::Exists { file, hint: "name another, or say --append to add a token to it" }
        }
        error => error,
    })
}

/// Appends `token` to a file, or creates the file. Afterwards only its owner can read it. Returns
/// the number of tokens in it.
///
/// # Errors
///
/// Nothing has been written if the file holds something else than tokens, or would hold more than
/// [`MAX_TOKENS`](rpc_transports::identity::MAX_TOKENS); the file cannot be read or written.
pub fn append(token: &str, file: &Path) -> Result<usize, PkiError> {
    // A link is followed, and not replaced.
    let file: PathBuf = file.canonicalize().unwrap_or_else(|_| file.to_owned());
    let mut text = read_if_there(&file)?.unwrap_or_default();
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text.push_str(token);
    text.push('\n');
    Tokens::parse(&text).map_err(|source| PkiError::TokenFile { file: file.clone(), source })?;
    write(&file, &text, Mode::Private)?;
    Ok(text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).count())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use rpc_transports::identity::MAX_TOKENS;

    use super::*;

    fn mode(file: &Path) -> u32 {
        fs::metadata(file).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn tokens_are_never_the_same_and_can_have_a_name() {
        let (first, second) = (generate(None).unwrap(), generate(None).unwrap());
        assert!(first != second && first.starts_with("rpct_"), "{first}");
        let named: Token = generate(Some("board-1")).unwrap().parse().unwrap();
        assert_eq!((named.name(), named.secret().len()), ("board-1", first.len()));
        for bad in ["", "two words", "anonymous", "a/b"] {
            assert!(generate(Some(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_stored_token_is_private_and_is_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        let token = generate(None).unwrap();
        store(&token, &file).unwrap();
        assert_eq!((fs::read_to_string(&file).unwrap(), mode(&file)), (format!("{token}\n"), 0o600));
        let error = store(&generate(None).unwrap(), &file).unwrap_err();
        assert!(error.to_string().contains("--append"), "{error}");
        assert_eq!(fs::read_to_string(&file).unwrap().trim(), token);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing is left behind");
    }

    #[test]
    fn a_token_is_added_on_a_line_of_its_own_and_the_file_becomes_private() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("tokens"), folder.path().join("link"));
        let old = format!("# old\n{}", generate(None).unwrap());
        fs::write(&file, &old).unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let token = generate(Some("new")).unwrap();
        assert_eq!(append(&token, &link).unwrap(), 2);
        assert_eq!(fs::read_to_string(&file).unwrap(), format!("{old}\n{token}\n"));
        assert_eq!(mode(&file), 0o600);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(append(&token, &folder.path().join("absent")).unwrap(), 1);
    }

    #[test]
    fn a_file_that_would_not_be_accepted_is_left_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let full: String = (0..MAX_TOKENS).map(|_| generate(None).unwrap() + "\n").collect();
        for contents in ["something else\n", &full] {
            let file = folder.path().join("tokens");
            fs::write(&file, contents).unwrap();
            let error = append(&generate(None).unwrap(), &file).unwrap_err();
            assert!(matches!(error, PkiError::TokenFile { .. }), "{error}");
            assert_eq!(fs::read_to_string(&file).unwrap(), contents);
        }
    }
}
