//! The macro `settings!`: one declaration gives the flags, the environment variables, the keys of
//! the file and the defaults. And `listener_settings!`, with the settings of all that listens.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use toml::Spanned;

macro_rules! settings {
    (
        $settings:ident => $config:ident, $config_env:expr, $what:literal;
        settings {
            $($(#[doc = $doc:literal])+ $(#[arg($($arg:tt)*)])? $name:ident: $type:ty = $default:expr, $env:expr;)+
        }
        optional {
            $($(#[doc = $odoc:literal])+ $(#[arg($($oarg:tt)*)])? $oname:ident: $otype:ty, $oenv:expr;)+
        }
    ) => {
        #[doc = concat!("Settings of ", $what, " from one source: the command line with the environment, or a file.")]
        /// Each may be absent.
        ///
        #[doc = concat!("[`resolve`](Self::resolve) makes a [`", stringify!($config), "`] of them.")]
        #[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
        #[non_exhaustive]
        pub struct $settings {
            /// File with settings, in TOML. Flags and environment variables override it
            #[arg(long, env = $config_env, value_name = "FILE")]
            #[serde(skip)]
            pub config: Option<PathBuf>,
            $(
                $(#[doc = $doc])+
                #[arg(long, env = $env, $($($arg)*)?)]
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $name: Option<$type>,
            )+
            $(
                $(#[doc = $odoc])+
                #[arg(long, env = $oenv, $($($oarg)*)?)]
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $oname: Option<$otype>,
            )+
        }

        #[doc = concat!("Complete settings of ", $what, ". Make one from [`Default`] with `..`: fields will be added.")]
        #[derive(Clone, Debug, PartialEq, Serialize)]
        #[serde(rename_all = "kebab-case")]
        pub struct $config {
            $($(#[doc = $doc])+ pub $name: $type,)+
            $(
                $(#[doc = $odoc])+
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $oname: Option<$otype>,
            )+
        }

        impl $settings {
            /// Reads settings from the text of a configuration file.
            ///
            /// # Errors
            ///
            /// [`ConfigError::Syntax`] with the position: not TOML, an unknown key, or a malformed
            /// value.
            pub fn from_toml(text: &str, file: &Path) -> Result<Self, ConfigError> {
                let flags = <Self as clap::Args>::augment_args(clap::Command::new(""));
                toml::from_str(&$crate::config::settings::with_lists(text, &flags))
                    .map_err(|error| ConfigError::Syntax { file: file.to_owned(), source: Box::new(error) })
            }

            /// Fills the gaps of these settings from their configuration file, if they name one.
            pub(super) fn with_file(self) -> Result<Self, ConfigError> {
                let Some(file) = &self.config else { return Ok(self) };
                let text = fs::read_to_string(file)
                    .map_err(|source| ConfigError::Read { file: file.clone(), source: Arc::new(source) })?;
                let lower = Self::from_toml(&text, file)?;
                Ok(self.or(lower))
            }

            /// Fills the gaps of these settings from `lower`.
            #[must_use]
            pub fn or(self, lower: Self) -> Self {
                Self {
                    config: self.config.or(lower.config),
                    $($name: self.$name.or(lower.$name),)+
                    $($oname: self.$oname.or(lower.$oname),)+
                }
            }

            /// Fills the gaps from the configuration file, if there is one, and from the defaults,
            /// and checks the result.
            ///
            /// # Errors
            ///
            /// The file or the settings as a whole are wrong.
            pub fn resolve(self) -> Result<$config, ConfigError> {
                self.resolve_with(&crate::transports())
            }

            /// As [`resolve`](Self::resolve), for a program that uses these transports.
            ///
            /// # Errors
            ///
            /// As [`resolve`](Self::resolve).
            pub fn resolve_with(self, transports: &rpc_transports::Transports) -> Result<$config, ConfigError> {
                let mut config = self.with_file()?.complete();
                config.listen_by_default();
                config.check_with(transports)?;
                Ok(config)
            }

            pub(super) fn complete(self) -> $config {
                $config {
                    $($name: self.$name.unwrap_or_else(|| $default),)+
                    $($oname: self.$oname,)+
                }
            }
        }

        impl $config {
            /// Returns the configuration as TOML, from which it can be read again.
            ///
            /// # Errors
            ///
            /// [`ConfigError::NotText`]: a path is not UTF-8.
            pub fn to_toml(&self) -> Result<String, ConfigError> {
                toml::to_string(self).map_err(|source| ConfigError::NotText { source: Box::new(source) })
            }

            /// Returns the files that authenticate clients, and this program to them.
            pub fn trust(&self) -> ServerTrust {
                ServerTrust {
                    cert: self.cert.clone(),
                    cert_key: self.cert_key.clone(),
                    client_ca: self.client_ca.clone(),
                    token_file: self.token_file.clone(),
                }
            }
        }

        impl Default for $config {
            fn default() -> Self {
                let mut config = $settings::default().complete();
                config.listen_by_default();
                config
            }
        }
    };
}

/// Returns the text of a configuration file with brackets around single values of the settings
/// that are lists: `listen = "unix:/a"` means `listen = ["unix:/a"]`. `command` has the flags of
/// the settings. All lines stay where they are.
pub(super) fn with_lists(text: &str, command: &clap::Command) -> String {
    let mut text = text.to_owned();
    let Ok(values) = toml::from_str::<BTreeMap<String, Spanned<toml::Value>>>(&text) else { return text };
    let is_list = |arg: &clap::Arg| matches!(arg.get_action(), clap::ArgAction::Append);
    let lists: Vec<_> = command.get_arguments().filter(|arg| is_list(arg)).filter_map(clap::Arg::get_long).collect();
    let single =
        |(key, value): &(String, Spanned<toml::Value>)| lists.contains(&key.as_str()) && value.as_ref().is_str();
    let mut spans: Vec<_> = values.into_iter().filter(single).map(|(_, value)| value.span()).collect();
    // From the last on, so that the others stay where they are.
    spans.sort_unstable_by_key(|span| Reverse(span.start));
    for span in spans {
        text.insert(span.end, ']');
        text.insert(span.start, '[');
    }
    text
}

/// Declares settings as `settings!` does, and adds those of every program that listens. Their
/// environment variables begin with `$prefix`.
macro_rules! listener_settings {
    (
        $settings:ident => $config:ident, $prefix:literal, $what:literal;
        settings { $($settings_declared:tt)* }
        optional { $($optional_declared:tt)* }
    ) => {
        settings! {
            $settings => $config, concat!($prefix, "_CONFIG"), $what;
            settings {
                $($settings_declared)*
                /// Maximum number of connections in the handshake; for one more, the oldest of the
                /// machine that has most of them is closed. Default: 1024, or less if this process
                /// may open fewer than 8300 files
                max_handshakes: usize = $crate::file_limit::share(1, 1024) as usize,
                    concat!($prefix, "_MAX_HANDSHAKES");
                /// Time limit of a handshake
                #[arg(value_name = "TIME")]
                handshake_timeout: $crate::config::Span = $crate::config::units::seconds(10),
                    concat!($prefix, "_HANDSHAKE_TIMEOUT");
                /// Web pages that ws:// and wss:// addresses serve, by their origin, such as
                /// https://console.example; may be repeated, or given as a list with commas. A
                /// configuration file is read again for them at SIGHUP. Default: none, and only
                /// programs that are no browsers are served there
                #[arg(value_name = "ORIGIN", value_delimiter = ',')]
                allow_origin: Vec<$crate::config::Origin> = Vec::new(), concat!($prefix, "_ALLOW_ORIGIN");
                /// Filter of logged events: error, warn, info, debug, trace, off, or directives
                /// such as info,rpc_server=debug
                #[arg(value_name = "FILTER")]
                log_level: $crate::logging::LogFilter = $crate::logging::LogFilter::default(),
                    concat!($prefix, "_LOG_LEVEL");
                /// Format of log events on standard error
                log_format: $crate::logging::LogFormat = $crate::logging::LogFormat::Text,
                    concat!($prefix, "_LOG_FORMAT");
                /// Listen where other machines can connect without proof of identity
                #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
                insecure: bool = false, concat!($prefix, "_INSECURE");
                /// Stop when standard input ends, for a process that must end with the program that
                /// started it
                #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
                exit_with_stdin: bool = false, concat!($prefix, "_EXIT_WITH_STDIN");
            }
            optional {
                $($optional_declared)*
                /// Certificate to show at tls://, quic:// and wss:// addresses, followed by those up
                /// to its authority, as a PEM file, for example made by rpc-cli cert. Without it,
                /// --token-file is enough: one is made at the start
                #[arg(value_name = "FILE")]
                cert: PathBuf, concat!($prefix, "_CERT");
                /// Private key of --cert, as a PEM file
                #[arg(value_name = "FILE")]
                cert_key: PathBuf, concat!($prefix, "_CERT_KEY");
                /// Serve peers with a certificate by one of the authorities in this PEM file
                #[arg(value_name = "FILE")]
                client_ca: PathBuf, concat!($prefix, "_CLIENT_CA");
                /// Serve peers that know one of the tokens in this file, one a line, each after the
                /// name of its holder; for example made by rpc-cli token
                #[arg(value_name = "FILE")]
                token_file: PathBuf, concat!($prefix, "_TOKEN_FILE");
                /// File that is written when all addresses are listened on, with one address a
                /// line, and removed at the stop
                #[arg(value_name = "FILE")]
                ready_file: PathBuf, concat!($prefix, "_READY_FILE");
                /// Serve /metrics for Prometheus, /healthz and /readyz over HTTP at this address,
                /// such as 127.0.0.1:9464. Default: off
                #[arg(value_name = "ADDRESS")]
                metrics: $crate::config::HttpAddress, concat!($prefix, "_METRICS");
            }
        }
    };
}

/// Gives the configurations of trackers and relays the method `listener_config`, which returns the
/// settings that they share with servers.
macro_rules! listener_config {
    ($($config:ident)*) => {$(
        impl $config {
            fn listener_config(&self) -> $crate::config::ServeConfig {
                $crate::config::ServeConfig {
                    listen: self.listen.clone(),
                    // Probes and pipes; all sessions are bare connections.
                    max_total_open_files: $crate::file_limit::share(1, u64::MAX),
                    max_sessions: self.max_sessions,
                    max_sessions_per_peer: self.max_sessions_per_peer,
                    max_handshakes: self.max_handshakes,
                    handshake_timeout: self.handshake_timeout,
                    keep_alive: self.keep_alive,
                    allow_origin: self.allow_origin.clone(),
                    log_level: self.log_level.clone(),
                    log_format: self.log_format,
                    insecure: self.insecure,
                    exit_with_stdin: self.exit_with_stdin,
                    cert: self.cert.clone(),
                    cert_key: self.cert_key.clone(),
                    client_ca: self.client_ca.clone(),
                    token_file: self.token_file.clone(),
                    ready_file: self.ready_file.clone(),
                    metrics: self.metrics,
                    ..$crate::config::ServeConfig::default()
                }
            }
        }
    )*};
}
