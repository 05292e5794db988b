//! The codes of frames.

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal;)*) => {
        /// Code of a frame, which says what its body holds.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        #[repr(i32)]
        pub enum FrameCode {
            $($(#[$doc])* $name = $code,)*
        }

        impl FrameCode {
            /// All codes that are sent, by number.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Returns the code with this number. There is none for 0, which is never sent.
            #[must_use]
            pub const fn from_number(number: i32) -> Option<Self> {
                match number {
                    $($code => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// Returns TVM's name of the code.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)*
                }
            }

            /// Returns the number on the wire.
            #[must_use]
            pub const fn number(self) -> i32 {
                self as i32
            }
        }
    };
}

codes! {
    /// End of the session. From a server, only when that ends by itself.
    Shutdown = 1;
    /// First request: the protocol's version, and how the session is made.
    InitServer = 2;
    /// Calls a function.
    CallFunc = 3;
    /// Values that a request returns.
    Return = 4;
    /// Error of a request: one text.
    Exception = 5;
    /// Reads bytes of a tensor.
    CopyFromRemote = 6;
    /// Writes bytes to a tensor.
    CopyToRemote = 7;
    /// Bytes that were read.
    CopyAck = 8;
    /// Looks up a function by its name.
    GetGlobalFunc = 9;
    /// Frees an object.
    FreeHandle = 10;
    /// Makes a device the current one.
    DevSetDevice = 11;
    /// Reads an attribute of a device.
    DevGetAttr = 12;
    /// Allocates bytes.
    DevAllocData = 13;
    /// Frees what was allocated.
    DevFreeData = 14;
    /// Waits for a stream.
    DevStreamSync = 15;
    /// Copies between two tensors of the server.
    CopyAmongRemote = 16;
    /// Allocates a tensor.
    DevAllocDataWithScope = 17;
    /// Creates a stream.
    DevCreateStream = 18;
    /// Frees a stream.
    DevFreeStream = 19;
    /// Makes a stream the current one.
    DevSetStream = 20;
    /// Returns the current stream.
    DevGetCurrentStream = 21;
}

impl FrameCode {
    /// Returns true for the codes that a client sends.
    #[must_use]
    pub const fn is_request(self) -> bool {
        !matches!(self, Self::Return | Self::Exception | Self::CopyAck)
    }
}
