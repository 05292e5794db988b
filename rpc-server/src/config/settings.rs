//! The macro `settings!`: one declaration gives the flags, the environment variables, the keys of
//! the file and the defaults.

macro_rules! settings {
    (
        $settings:ident => $config:ident, $config_env:literal, $what:literal;
        settings {
            $($(#[doc = $doc:literal])+ $(#[arg($($arg:tt)*)])? $name:ident: $type:ty = $default:expr, $env:literal;)+
        }
        optional {
            $($(#[doc = $odoc:literal])+ $(#[arg($($oarg:tt)*)])? $oname:ident: $otype:ty, $oenv:literal;)+
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
                toml::from_str(text)
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
