//! Tokens: secrets that both sides know, and their text.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use ring::rand::{SecureRandom, SystemRandom};
use rpc_core::RpcError;
use rpc_core::proto::ANONYMOUS;

/// Number of tokens that one side may have at a time.
pub const MAX_TOKENS: usize = 16;

/// Least number of characters of a token: 128 bits in hexadecimal.
const MIN_SECRET: usize = 32;

/// Prefix of a generated token, by which a search for leaked secrets can find it.
const PREFIX: &str = "rpct_";

/// Longest name of a token.
const MAX_NAME: usize = 64;

/// Name of a token without one.
const DEFAULT_NAME: &str = "token";

/// A secret that both sides know. Its holder is known by its name.
///
/// Its text is `[NAME ]SECRET`: a name of letters, digits, `-`, `_` and `.`, and at least 32 other
/// characters without spaces, as [`Token::generate`] makes them. `Debug` shows no secret.
#[derive(Clone)]
pub struct Token {
    pub(super) name: String,
    pub(super) secret: String,
    /// True if the secret is that of a capability, whose id is the name.
    pub(super) is_capability: bool,
}

impl Token {
    /// Generates a token of 256 random bits.
    ///
    /// # Errors
    ///
    /// The system has no random numbers.
    pub fn generate() -> Result<Self, TokenError> {
        let random = random().map_err(|_| TokenError::NoRandomness)?;
        let hex: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { name: DEFAULT_NAME.to_owned(), secret: format!("{PREFIX}{hex}"), is_capability: false })
    }

    /// Returns the name by which the holder of the token is known.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the secret itself, for a file that only its owner can read.
    #[must_use]
    pub fn secret(&self) -> &str {
        &self.secret
    }
}

impl FromStr for Token {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        let mut words = text.split_whitespace();
        let (name, secret) = match (words.next(), words.next(), words.next()) {
            (Some(secret), None, None) => (DEFAULT_NAME, secret),
            (Some(name), Some(secret), None) => (name, secret),
            _ => return Err(TokenError::Malformed),
        };
        let named = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
        if !named || name.len() > MAX_NAME || matches!(name, "." | ".." | ANONYMOUS) {
            return Err(TokenError::Name);
        }
        if secret.len() < MIN_SECRET {
            return Err(TokenError::TooShort);
        }
        Ok(Self { name: name.to_owned(), secret: secret.to_owned(), is_capability: false })
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Tokens of one side, the preferred one first. There are several while an old one is being
/// replaced.
#[derive(Clone, Debug, Default)]
pub struct Tokens(pub(super) Arc<[Token]>);

impl Tokens {
    /// Creates a set of tokens.
    ///
    /// # Errors
    ///
    /// There are more than [`MAX_TOKENS`].
    pub fn new(tokens: impl IntoIterator<Item = Token>) -> Result<Self, TokenError> {
        let tokens: Arc<[Token]> = tokens.into_iter().collect();
        if tokens.len() > MAX_TOKENS { Err(TokenError::TooMany) } else { Ok(Self(tokens)) }
    }

    /// Parses the text of a file with one token a line. Empty lines and those that start with `#`
    /// are skipped.
    ///
    /// # Errors
    ///
    /// A line is malformed, or there is no token.
    pub fn parse(text: &str) -> Result<Self, TokenError> {
        let lines = text.lines().enumerate().map(|(number, line)| (number + 1, line.trim()));
        let tokens = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        let tokens = tokens
            .map(|(line, text)| text.parse().map_err(|source| TokenError::Line { line, source: Box::new(source) }));
        let tokens: Vec<Token> = tokens.collect::<Result<_, _>>()?;
        if tokens.is_empty() { Err(TokenError::None) } else { Self::new(tokens) }
    }

    /// Returns a number that tells this set from all others while it lives. `None` if it is empty.
    #[cfg(feature = "quic")]
    pub(crate) fn address(&self) -> Option<usize> {
        (!self.is_empty()).then(|| self.0.as_ptr().addr())
    }

    /// Returns true if there are no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Error of a text that is not a token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// There is no token where at least one is expected.
    #[error("there is no token; make one with: rpc-cli token")]
    None,
    /// There are more tokens than the other side would try.
    #[error("more than {MAX_TOKENS} tokens")]
    TooMany,
    /// The text is neither `SECRET` nor `NAME SECRET`.
    #[error("not of the form [NAME ]TOKEN")]
    Malformed,
    /// The name is not allowed.
    #[error("a token's name has up to 64 letters, digits, hyphens, underscores and dots, and is not 'anonymous'")]
    Name,
    /// The secret is so short that it could be guessed.
    #[error("a token has at least {MIN_SECRET} characters; make one with: rpc-cli token")]
    TooShort,
    /// The system has no random numbers.
    #[error("the system gives no random numbers")]
    NoRandomness,
    /// A line of a file is malformed.
    #[error("line {line}: {source}")]
    Line {
        /// Number of the line, from 1.
        line: usize,
        /// Error of the line.
        source: Box<Self>,
    },
}

/// Length of random values, in bytes.
pub(super) const LEN: usize = 32;

/// Returns random bytes of the system.
pub(crate) fn random() -> rpc_core::Result<[u8; LEN]> {
    let mut bytes = [0; LEN];
    SystemRandom::new().fill(&mut bytes).map_err(|_| RpcError::internal("the system gives no random numbers"))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "0123456789abcdef0123456789abcdef";

    #[test]
    fn a_token_is_a_name_and_a_secret() {
        let token: Token = Token::generate().unwrap().secret().parse().unwrap();
        assert_eq!((token.name(), token.secret().len()), ("token", PREFIX.len() + 64));
        assert!(!format!("{token:?}").contains(token.secret()));
        assert_eq!(format!("board-7 {SECRET}").parse::<Token>().unwrap().name(), "board-7");
        assert_eq!("short".parse::<Token>().unwrap_err(), TokenError::TooShort);
        for name in ["a/b", "..", "anonymous", &"n".repeat(65)] {
            assert_eq!(format!("{name} {SECRET}").parse::<Token>().unwrap_err(), TokenError::Name);
        }
        assert_eq!(Tokens::parse("# nothing\n").unwrap_err(), TokenError::None);
        assert_eq!(Tokens::parse(&format!("{SECRET}\n").repeat(17)).unwrap_err(), TokenError::TooMany);
        let error = Tokens::parse(&format!("{SECRET}\n\nx y z")).unwrap_err();
        assert!(error.to_string().starts_with("line 3"), "{error}");
    }
}
