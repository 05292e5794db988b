//! Errors of addresses: the reasons why a text is not one.

/// The reason why a text is not an address. Each message shows an example of the right form.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddressError {
    /// Missing scheme: the text does not begin with a word and a colon.
    #[error("{text:?} does not say how to connect; write for example tcp://host:9090")]
    NoScheme {
        /// The given text.
        text: String,
    },
    /// Malformed scheme in front of the colon.
    #[error("{text:?} is no scheme: it consists of letters, digits and +-. ; write for example tcp://host:9090")]
    Scheme {
        /// Word before the colon.
        text: String,
    },
    /// Unknown scheme: no transport is registered for it.
    #[error("no transport knows {scheme}: addresses; those that can be used here are {known}")]
    UnknownScheme {
        /// Word before the colon.
        scheme: String,
        /// Known schemes, with commas between them.
        known: String,
    },
    /// Malformed host, or malformed user in front of it.
    #[error("host {text:?}: {problem}; write for example tcp://board.lan:9090 or tcp://[::1]:9090")]
    Host {
        /// The host, or all text after the scheme if the host cannot be told apart.
        text: String,
        /// The problem with it.
        problem: &'static str,
    },
    /// Malformed port.
    #[error("port {text:?} is not a number from 0 to 65535; write for example tcp://board.lan:9090")]
    Port {
        /// Text after the colon.
        text: String,
    },
    /// Malformed or misplaced key of a server.
    #[error(
        "key {text:?}: {problem}; write for example tcp://host:9090/board-7 or \
         unix:/run/rpc.sock?key=board-7"
    )]
    Key {
        /// The key.
        text: String,
        /// The problem with it.
        problem: &'static str,
    },
    /// Malformed parameters.
    #[error("parameters {text:?}: {problem}; write for example ?name=value&other=value (%3F is a literal ?)")]
    Parameters {
        /// The text behind the question mark.
        text: String,
        /// The problem with it.
        problem: &'static str,
    },
    /// Pattern of addresses that stands for none.
    #[error("{text:?} stands for no address: {problem}; write for example tcp://10.0.0.*:9090")]
    Pattern {
        /// The pattern.
        text: String,
        /// The problem with it.
        problem: &'static str,
    },
    /// Well-formed address that its transport does not accept.
    #[error("bad address {address}: {problem}")]
    Invalid {
        /// The address.
        address: String,
        /// The problem with it, and the right form.
        problem: String,
    },
}

impl AddressError {
    /// Returns the text that the error is about.
    pub(crate) fn text(&self) -> &str {
        match self {
            Self::NoScheme { text }
            | Self::Scheme { text }
            | Self::UnknownScheme { scheme: text, .. }
            | Self::Host { text, .. }
            | Self::Port { text }
            | Self::Key { text, .. }
            | Self::Parameters { text, .. }
            | Self::Pattern { text, .. }
            | Self::Invalid { address: text, .. } => text,
        }
    }
}
