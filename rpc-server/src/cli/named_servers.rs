//! Named servers: the configuration file of the user, whose names stand for addresses as `@NAME`.
//!
//! ```toml
//! default = "board"
//!
//! [server.board]
//! address = "tls://board.lan"
//! via = ["quic://gateway.lan"]
//! token-file = "board.token"
//! ```

use std::collections::BTreeMap;
use std::env;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rpc_transports::{Address, AddressError};
use serde::{Deserialize, Serialize};
use toml::Spanned;

use super::failure::Failure;
use super::failure_report::TUNNEL;
use crate::config::{ConfigError, Span};
use crate::pki::private_file::{Mode, write};
use crate::suggestion::similar_name;

/// First character of a name in place of an address. Alone it stands for the default server.
const SIGN: char = '@';

/// Permissions by which users other than the owner may write a file.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Error of a named server, or of the file that names it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NamedServerError {
    /// The file cannot be read, or is not right.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Other users could lead this user to servers of theirs.
    #[error("other users may write {0}, and so lead you to other servers: chmod go-w {0}", file.display())]
    Writable {
        /// The file.
        file: PathBuf,
    },
    /// There is no place for the file.
    #[error("neither XDG_CONFIG_HOME nor HOME says where the file with named servers is: give --config FILE")]
    NoFile,
    /// The file has no such server.
    #[error("no server is called '{name}' in {}{}", file.display(), hint(similar.as_deref()))]
    Unknown {
        /// The name.
        name: String,
        /// The file.
        file: PathBuf,
        /// The name that was probably meant.
        similar: Option<String>,
    },
    /// The address was left out, and there is no default.
    #[error(
        "no address is given, and {} sets no default: give an address, such as tcp://board.lan, or set one: \
         rpc-cli use NAME ADDRESS", file.display()
    )]
    NoDefault {
        /// The file.
        file: PathBuf,
    },
    /// The way to a server leads through the server itself.
    #[error("the way to the server '{name}' leads through itself: correct `via` in {}", file.display())]
    Loop {
        /// The name.
        name: String,
        /// The file.
        file: PathBuf,
    },
    /// Two servers on one way need credentials of their own.
    #[error(
        "{first} and {other} are on one way, and have different files as {setting}: put the tokens or certificates \
         of both into one file, and name that for both"
    )]
    Credentials {
        /// The setting.
        setting: &'static str,
        /// Address of one server.
        first: String,
        /// Address of the other one.
        other: String,
    },
    /// The address in the file, or with the key that was given, is malformed.
    #[error("the address of the server '{name}' cannot be used")]
    Address {
        /// The name.
        name: String,
        /// The reason.
        source: AddressError,
    },
    /// The name would be read as something else.
    #[error("'{name}' is no name of a server: use letters, digits and -_.")]
    Name {
        /// The name.
        name: String,
    },
    /// The server to be added is there.
    #[error("a server is called '{name}' already: change it in {}", file.display())]
    Exists {
        /// The name.
        name: String,
        /// The file.
        file: PathBuf,
    },
    /// The file is written in a form that is not changed here.
    #[error("{} is written in a form that this command cannot change: change it with an editor", file.display())]
    Form {
        /// The file.
        file: PathBuf,
    },
}

fn hint(similar: Option<&str>) -> String {
    similar.map_or_else(
        || ": rpc-cli use lists all, and rpc-cli use NAME ADDRESS adds one".to_owned(),
        |similar| format!("; did you mean '{similar}'?"),
    )
}

/// A server of the file, and how to reach it. Files are relative to the folder of the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct NamedServer {
    pub(super) address: String,
    /// Hops on the way, as for `--jump`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) via: Vec<String>,
    /// Key of one of several servers behind the address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_file: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ca: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cert: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cert_key: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) timeout: Option<Span>,
}

/// Content of the file.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Content {
    /// Name of the default server.
    #[serde(skip_serializing_if = "Option::is_none")]
    default: Option<Spanned<String>>,
    server: BTreeMap<String, NamedServer>,
}

/// The file with the named servers of a user.
#[derive(Debug)]
pub(super) struct NamedServers {
    file: PathBuf,
    text: String,
    content: Content,
}

/// The way to a server: the addresses of the hops and, last, its own; and the named servers among
/// them, the last first.
#[derive(Debug, Default)]
pub(super) struct Route<'a> {
    pub(super) addresses: Vec<String>,
    pub(super) servers: Vec<&'a NamedServer>,
}

impl NamedServers {
    /// Reads the given file, or else that of the user, which may be missing.
    pub(super) fn read(file: Option<&Path>) -> Result<Self, NamedServerError> {
        let file = match file {
            Some(file) => file.to_owned(),
            None => default_file().ok_or(NamedServerError::NoFile)?,
        };
        let text = read_own(&file)?;
        let content = parse(&text, &file)?;
        Ok(Self { file, text, content })
    }

    /// Returns the file.
    pub(super) fn file(&self) -> &Path {
        &self.file
    }

    /// Returns the name of the default server.
    pub(super) fn default_name(&self) -> Option<&str> {
        self.content.default.as_ref().map(|name| name.as_ref().as_str())
    }

    /// Returns all servers by name.
    pub(super) fn servers(&self) -> impl Iterator<Item = (&str, &NamedServer)> {
        self.content.server.iter().map(|(name, server)| (name.as_str(), server))
    }

    /// Returns the way to `address`, which is an address or `@NAME[/KEY]`.
    pub(super) fn route(&self, address: &str) -> Result<Route<'_>, NamedServerError> {
        let mut route = Route::default();
        self.extend_route(&mut route, address, &mut Vec::new())?;
        Ok(route)
    }

    /// Appends the way to `address`. `open` has the names of the servers whose hops are appended.
    fn extend_route<'a>(
        &'a self,
        route: &mut Route<'a>,
        address: &str,
        open: &mut Vec<&'a str>,
    ) -> Result<(), NamedServerError> {
        let (tunnel, target) = split_tunnel(address);
        let Some(reference) = target.strip_prefix(SIGN) else {
            route.addresses.push(address.to_owned());
            return Ok(());
        };
        let (name, key) = reference.split_once('/').map_or((reference, None), |(name, key)| (name, Some(key)));
        let (name, server) = self.find(name)?;
        if open.contains(&name) {
            return Err(NamedServerError::Loop { name: name.to_owned(), file: self.file.clone() });
        }
        open.push(name);
        for hop in &server.via {
            self.extend_route(route, hop, open)?;
        }
        open.pop();
        let mut address = server.address.clone();
        if let Some(key) = key.or(server.key.as_deref()) {
            let with_key = address.parse::<Address>().and_then(|address| address.with_key(key));
            let malformed = |source| NamedServerError::Address { name: name.to_owned(), source };
            address = with_key.map_err(malformed)?.to_string();
        }
        route.addresses.push(format!("{tunnel}{address}"));
        route.servers.insert(0, server);
        Ok(())
    }

    /// Returns the server of that name, or the default one if the name is empty.
    fn find(&self, name: &str) -> Result<(&str, &NamedServer), NamedServerError> {
        let no_default = || NamedServerError::NoDefault { file: self.file.clone() };
        let name = if name.is_empty() { self.default_name().ok_or_else(no_default)? } else { name };
        let found = self.content.server.get_key_value(name).map(|(name, server)| (name.as_str(), server));
        found.ok_or_else(|| {
            let similar = similar_name(name, self.servers().map(|(name, _)| name)).map(str::to_owned);
            NamedServerError::Unknown { name: name.to_owned(), file: self.file.clone(), similar }
        })
    }

    /// Makes the server of this name the default one.
    pub(super) fn set_default(self, name: &str) -> Result<(), Failure> {
        let (name, _) = self.find(name)?;
        let name = name.to_owned();
        self.change(&name, None)
    }

    /// Adds a server, and makes it the default one.
    pub(super) fn add(self, name: &str, server: NamedServer) -> Result<(), Failure> {
        self.check_new(name, |_| false)?;
        self.change(name, Some(server))
    }

    /// Returns the address of the server of this name; `None` if there is none, and so one can be
    /// added.
    ///
    /// # Errors
    ///
    /// The name is malformed, or stands for a server that is not the `same`.
    pub(super) fn check_new(
        &self,
        name: &str,
        same: impl Fn(&NamedServer) -> bool,
    ) -> Result<Option<String>, NamedServerError> {
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || !name.chars().all(is_name) {
            return Err(NamedServerError::Name { name: name.to_owned() });
        }
        match self.content.server.get(name) {
            Some(server) if same(server) => Ok(Some(server.address.clone())),
            Some(_) => Err(NamedServerError::Exists { name: name.to_owned(), file: self.file.clone() }),
            None => Ok(None),
        }
    }

    /// Writes the file with another default server, and with one server more if it is given. The
    /// rest of the text is kept as it is, with its comments.
    fn change(mut self, name: &str, added: Option<NamedServer>) -> Result<(), Failure> {
        let quoted = toml::Value::from(name).to_string();
        match &self.content.default {
            Some(default) => self.text.replace_range(default.span(), &quoted),
            // A key behind the first table would belong to it.
            None => self.text.insert_str(0, &format!("default = {quoted}\n\n")),
        }
        if let Some(server) = added {
            let server = BTreeMap::from([(name.to_owned(), server)]);
            let table = toml::to_string(&Content { default: None, server: server.clone() });
            let table = table.map_err(|source| ConfigError::NotText { source: Box::new(source) });
            let separator = if self.text.ends_with('\n') { "\n" } else { "\n\n" };
            self.text.push_str(separator);
            self.text.push_str(&table.map_err(NamedServerError::from)?);
            self.content.server.extend(server);
        }
        // For example, no table can be added to `server = { … }`.
        let changed = parse(&self.text, &self.file).ok();
        let is_right = |changed: &Content| {
            changed.default.as_ref().is_some_and(|default| default.as_ref() == name)
                && changed.server == self.content.server
        };
        if !changed.as_ref().is_some_and(is_right) {
            return Err(NamedServerError::Form { file: self.file }.into());
        }
        if let Some(folder) = self.file.parent() {
            fs::create_dir_all(folder).map_err(|error| Failure::file("cannot make the folder", folder, error))?;
        }
        // A link is followed, and not replaced.
        let file = self.file.canonicalize().unwrap_or(self.file);
        Ok(write(&file, &self.text, Mode::Private)?)
    }

    /// Returns a path of the file as one that does not depend on the current folder.
    pub(super) fn resolve_path(&self, path: &Path) -> PathBuf {
        match (path.strip_prefix("~"), env::home_dir()) {
            (Ok(rest), Some(home)) => home.join(rest),
            _ => self.file.parent().unwrap_or(Path::new("")).join(path),
        }
    }
}

/// Returns true if the text names a server of the file, also as a hop.
pub(super) fn is_reference(address: &str) -> bool {
    split_tunnel(address).1.starts_with(SIGN)
}

/// Splits the prefix of a hop that passes bytes from the address.
pub(super) fn split_tunnel(hop: &str) -> (&str, &str) {
    hop.split_at(if hop.starts_with(TUNNEL) { TUNNEL.len() } else { 0 })
}

/// Returns the file of the user: `rpc/config.toml` in `$XDG_CONFIG_HOME` or `~/.config`.
fn default_file() -> Option<PathBuf> {
    let folder = env::var_os("XDG_CONFIG_HOME").map(PathBuf::from).filter(|folder| folder.is_absolute());
    let folder = folder.or_else(|| env::home_dir().map(|home| home.join(".config")))?;
    Some(folder.join("rpc/config.toml"))
}

/// Reads a file that only its owner may write; a missing one is empty.
fn read_own(file: &Path) -> Result<String, NamedServerError> {
    let mut text = String::new();
    let read = File::open(file).and_then(|mut opened| {
        let mode = opened.metadata()?.permissions().mode();
        opened.read_to_string(&mut text).map(|_| mode)
    });
    match read {
        Ok(mode) if mode & WRITABLE_BY_OTHERS != 0 => Err(NamedServerError::Writable { file: file.to_owned() }),
        Ok(_) => Ok(text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(text),
        Err(error) => Err(ConfigError::Read { file: file.to_owned(), source: Arc::new(error) }.into()),
    }
}

fn parse(text: &str, file: &Path) -> Result<Content, ConfigError> {
    toml::from_str(text).map_err(|error| ConfigError::Syntax { file: file.to_owned(), source: Box::new(error) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
# My machines.
default = 'board' # the usual one

[server.board] # on the shelf
address = 'tls://board.lan'
via = ['tunnel:@gate', 'tcp://inner:1']
token-file = 'board.token'

[server.gate]
address = 'quic://gate.lan'
via = ['tcp://outer:1']

[server.pool]
address = 'tracker://pool.lan'
key = 'h100'

[server.ring]
address = 'tcp://ring:1'
via = ['@ring']
";

    fn servers(folder: &Path, text: &str) -> Result<NamedServers, NamedServerError> {
        let file = folder.join("config.toml");
        write(&file, text, Mode::Private).unwrap();
        NamedServers::read(Some(&file))
    }

    #[test]
    fn a_name_stands_for_an_address_and_the_hops_on_the_way() {
        let folder = tempfile::tempdir().unwrap();
        let servers = servers(folder.path(), TEXT).unwrap();
        for (reference, way) in [
            ("@board", "tcp://outer:1 tunnel:quic://gate.lan tcp://inner:1 tls://board.lan"),
            ("@", "tcp://outer:1 tunnel:quic://gate.lan tcp://inner:1 tls://board.lan"),
            ("@pool", "tracker://pool.lan/h100"),
            ("@pool/a100", "tracker://pool.lan/a100"),
            ("tunnel:@pool", "tunnel:tracker://pool.lan/h100"),
            ("tcp://other:1", "tcp://other:1"),
        ] {
            assert_eq!(servers.route(reference).unwrap().addresses.join(" "), way, "{reference}");
        }
        for (reference, says) in [("@bord", "did you mean 'board'"), ("@x", "rpc-cli use NAME"), ("@ring", "itself")] {
            let error = servers.route(reference).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        assert_eq!(servers.resolve_path(Path::new("board.token")), folder.path().join("board.token"));
        assert_eq!(servers.resolve_path(Path::new("/board.token")), Path::new("/board.token"));
    }

    #[test]
    fn a_changed_file_keeps_its_comments_and_order() {
        let folder = tempfile::tempdir().unwrap();
        servers(folder.path(), TEXT).unwrap().set_default("gate").unwrap();
        let file = folder.path().join("config.toml");
        assert_eq!(fs::read_to_string(&file).unwrap(), TEXT.replace("'board' #", "\"gate\" #"));
        let other = NamedServer {
            address: "tcp://b".to_owned(),
            ..servers(folder.path(), TEXT).unwrap().content.server["ring"].clone()
        };
        servers(folder.path(), "# None yet.").unwrap().add("my.board", other.clone()).unwrap();
        NamedServers::read(Some(&file)).unwrap().add("b", other.clone()).unwrap();
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.starts_with("default = \"b\"\n\n# None yet.\n\n[server.\"my.board\"]\n"), "{text}");
        let again = NamedServers::read(Some(&file)).unwrap();
        assert_eq!(again.servers().collect::<Vec<_>>(), [("b", &other), ("my.board", &other)]);

        let exists = again.add("b", other.clone()).unwrap_err();
        assert!(exists.to_string().contains("already"), "{exists}");
        let inline = servers(folder.path(), "server = { a = { address = 'tcp://a' } }").unwrap();
        let refused = inline.add("b", other.clone()).unwrap_err();
        assert!(refused.to_string().contains("with an editor"), "{refused}");
        let unnamed = servers(folder.path(), "").unwrap().add("a b", other).unwrap_err();
        assert!(unnamed.to_string().contains("use letters"), "{unnamed}");
    }

    #[test]
    fn a_file_that_is_wrong_or_open_to_others_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let misspelt = "[server.a]\naddress = 'tcp://a'\ntoken_file = 't'";
        for (text, says) in
            [(misspelt, "did you mean 'token-file'"), ("server", "not right"), ("defalt = 'a'", "default")]
        {
            let error = servers(folder.path(), text).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        let file = folder.path().join("config.toml");
        write(&file, TEXT, Mode::Private).unwrap();
        for mode in [0o620, 0o602] {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            let error = NamedServers::read(Some(&file)).unwrap_err().to_string();
            assert!(error.contains("chmod go-w"), "{error}");
        }
        assert_eq!(NamedServers::read(Some(&folder.path().join("none"))).unwrap().default_name(), None);
    }
}
