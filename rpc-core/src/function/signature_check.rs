//! Signatures for typed clients: the function by which an origin reports them, and the comparison
//! with a client's types.

use crate::error::{ErrorKind, Result, RpcError};
use crate::function::context::Context;
use crate::function::function::Function;

/// `(name) -> [params, returns]`, or null if no function has that name.
pub(crate) const NAME: &str = "rpc.signature";

/// Returns the function that every registry has for signatures.
pub(crate) fn function() -> (String, Function) {
    let tell = |context: Context, name: String| {
        let signature = context.function(&name).ok()?.signature().clone();
        let params: Vec<_> = signature.params.into_iter().map(String::from).collect();
        Some((params, String::from(signature.returns)))
    };
    (NAME.to_owned(), Function::inline(tell))
}

/// Returns true if `error` means that the origin reports no signatures: it lacks the function for
/// them, or does not let this client call it.
pub(crate) fn is_untold(error: &RpcError) -> bool {
    matches!(
        error.kind(),
        ErrorKind::NotFound | ErrorKind::Refused | ErrorKind::Unauthenticated | ErrorKind::Unsupported
    )
}

/// The types that a client calls a function with, as far as they are known.
pub(crate) struct ClientTypes {
    /// The kinds of the arguments; `None` if their number is not known.
    pub(crate) args: Option<Vec<Option<&'static str>>>,
    pub(crate) returns: Option<&'static str>,
}

/// Kinds of values that signatures name. Any other name belongs to a type of the program, which may
/// accept anything.
const KINDS: [&str; 16] = [
    "null", "bool", "int", "float", "str", "bytes", "shape", "dtype", "device", "packed", "list", "map", "function",
    "module", "tensor", "object",
];

impl ClientTypes {
    /// Compares the types with the signature of `name`. Types that either side leaves open fit.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument), with both types.
    pub(crate) fn check(&self, name: &str, params: &[String], returns: &str) -> Result<()> {
        if let Some(args) = &self.args {
            let is_open = params.iter().any(|param| param == "...");
            let needed = params.iter().filter(|param| matches!(kind(param), Some((_, false)))).count();
            if !is_open && !(needed..=params.len()).contains(&args.len()) {
                let (takes, given) = (params.len(), args.len());
                return Err(RpcError::invalid_argument(format!(
                    "{given} arguments are given, and `{name}` takes {takes}"
                )));
            }
            let open_at = params.iter().position(|param| param == "...").unwrap_or(params.len());
            for (index, (param, arg)) in params[..open_at].iter().zip(args).enumerate() {
                if let (Some((expected, is_optional)), Some(got)) = (kind(param), *arg)
                    && !accepts(expected, got)
                    && !(is_optional && got == "null")
                {
                    return Err(RpcError::invalid_argument(format!(
                        "argument {index} of `{name}`: expected {param}, got {got}"
                    )));
                }
            }
        }
        if let (Some((got, _)), Some(expected)) = (kind(returns), self.returns)
            && !yields(got, expected)
        {
            return Err(RpcError::invalid_argument(format!("return of `{name}`: expected {expected}, got {returns}")));
        }
        Ok(())
    }
}

/// Returns the kind of values that a name in a signature stands for, and true with it if null is
/// accepted as well. `None` for names that leave it open, among them unions such as `int | str`.
fn kind(name: &str) -> Option<(&'static str, bool)> {
    if is_union(name) {
        return None;
    }
    let (name, is_optional) = match name.strip_suffix('?') {
        Some(name) => (name, true),
        None => (name, false),
    };
    let base = match name {
        "mut tensor" => "tensor",
        _ if name.starts_with("packed<") => "packed",
        _ if name.starts_with("object<") => "object",
        _ if name.starts_with('[') || name.starts_with('(') => "list",
        _ if name.starts_with('{') => "map",
        _ => name,
    };
    KINDS.into_iter().find(|kind| *kind == base).map(|kind| (kind, is_optional))
}

/// Returns the kind of a client's type by its name in signatures. `None` if the name leaves it
/// open, as that of an optional type does, of which each call gives one or the other.
pub(crate) fn plain_kind(name: &str) -> Option<&'static str> {
    kind(name).filter(|(_, is_optional)| !is_optional).map(|(kind, _)| kind)
}

/// Returns true if a name in a signature may be a union: it has ` | ` outside of all brackets, or
/// its brackets are not in pairs, so that this cannot be told.
fn is_union(name: &str) -> bool {
    let mut depth = 0_i32;
    for (at, byte) in name.bytes().enumerate() {
        match byte {
            b'<' | b'[' | b'(' | b'{' => depth += 1,
            b'>' | b']' | b')' | b'}' => depth -= 1,
            b'|' if depth == 0 && name[..at].ends_with(' ') && name[at..].starts_with("| ") => return true,
            _ => {}
        }
    }
    depth != 0
}

/// Kinds of values that are never objects.
const SCALARS: [&str; 5] = ["bool", "int", "float", "dtype", "device"];

/// Returns true if a function may take an argument of kind `got` for a parameter of kind
/// `expected`. Functions of TVM-FFI convert more kinds than those of a Rust registry, and take
/// every reference, string and container for an `object<ffi.Object>`.
fn accepts(expected: &str, got: &str) -> bool {
    let is_converted =
        matches!((got, expected), ("bool" | "int", "float") | ("bool", "int") | ("int", "bool") | ("str", "dtype"));
    got == expected || is_converted || (expected == "object" && !SCALARS.contains(&got))
}

/// Returns true if a return of kind `got` may be converted to a client's type of kind `expected`.
/// A client converts less than functions do. An `object<ffi.Object>` may be a reference to a
/// tensor, a function or a module as well.
fn yields(got: &str, expected: &str) -> bool {
    got == expected || (got, expected) == ("int", "float") || (got == "object" && !SCALARS.contains(&expected))
}

#[cfg(test)]
mod tests {
    use super::{ClientTypes, kind};
    use crate::client::{RemoteTensor, Session};
    use crate::function::{Pack, Registry};
    use crate::tensor::TensorView;
    use crate::{ErrorKind, LocalSession, Operation, Request, Result, RpcError, RpcSession, Submission, Value};

    #[test]
    fn the_types_of_a_function_are_compared_with_its_signature_when_it_is_fetched() {
        let registry = Registry::new();
        registry.add("add", |a: f64, b: i64| a + b as f64);
        registry.add("open", |path: String, mode: Option<String>| format!("{path}{mode:?}"));
        registry.add("norm", |x: TensorView, names: Vec<String>| x.shape().len() as i64 + names.len() as i64);
        registry.add("pack", |Pack(pair): Pack<(u8, u8)>| pair.0);
        registry.add("rest", |first: i64, _rest: crate::function::Rest| first);
        let session = Session::new(LocalSession::new(registry));
        fn told<T>(outcome: Result<T>) -> String {
            outcome.err().map_or_else(String::new, |error| error.message().to_owned())
        }

        assert_eq!(told(session.function::<(f64, i32), f32>("add").wait()), "");
        assert_eq!(told(session.function::<(u8, u8), f64>("add").wait()), "");
        assert_eq!(told(session.function::<Vec<Value>, Value>("add").wait()), "");
        let refused = told(session.function::<(&str, i64), f64>("add").wait());
        assert_eq!(refused, "argument 0 of `add`: expected float, got str");
        let refused = told(session.function::<(f64, f64), f64>("add").wait());
        assert_eq!(refused, "argument 1 of `add`: expected int, got float");
        assert_eq!(told(session.function::<(f64,), f64>("add").wait()), "1 arguments are given, and `add` takes 2");
        let refused = told(session.function::<(f64, i64), String>("add").wait());
        assert_eq!(refused, "return of `add`: expected str, got float");

        assert_eq!(told(session.function::<(&str,), String>("open").wait()), "");
        assert_eq!(told(session.function::<(&str, ()), String>("open").wait()), "");
        let refused = told(session.function::<(&str, i64), String>("open").wait());
        assert_eq!(refused, "argument 1 of `open`: expected str?, got int");
        assert_eq!(told(session.function::<(&RemoteTensor, Vec<String>), i64>("norm").wait()), "");
        assert!(
            told(session.function::<(&RemoteTensor, &str), i64>("norm").wait()).contains("expected [str], got str")
        );
        // The names of the types inside of packed values need not be the same at both ends.
        assert_eq!(told(session.function::<(Pack<[u8; 2]>,), u8>("pack").wait()), "");
        assert_eq!(told(session.function::<(i64, &str, bool), i64>("rest").wait()), "");
        assert!(told(session.function::<(&str, &str), i64>("rest").wait()).contains("argument 0 of `rest`"));
        assert!(told(session.function::<(), ()>("none").wait()).contains("no function is registered"));
    }

    #[test]
    fn types_may_be_given_by_their_names() {
        let registry = Registry::new();
        registry.add("open", |path: String, mode: Option<String>| format!("{path}{mode:?}"));
        let session = Session::new(LocalSession::new(registry));
        let told = |args: Option<&[&str]>, returns: &str| {
            let args = args.map(|args| args.iter().map(|arg| (*arg).to_owned()).collect::<Vec<_>>());
            let outcome = session.function_of_types("open", args.as_deref(), returns).wait();
            outcome.err().map_or_else(String::new, |error| error.message().to_owned())
        };
        for args in [None, Some(&["str"][..]), Some(&["str", "null"]), Some(&["str", "str?"]), Some(&["any", "a | b"])]
        {
            for returns in ["str", "any", "int?", "int | str"] {
                assert_eq!(told(args, returns), "", "{args:?} {returns}");
            }
        }
        assert_eq!(told(Some(&["[str]"]), "str"), "argument 0 of `open`: expected str, got list");
        assert_eq!(told(Some(&["str", "int"]), "str"), "argument 1 of `open`: expected str?, got int");
        assert_eq!(told(Some(&[]), "str"), "0 arguments are given, and `open` takes 2");
        assert_eq!(told(None, "int"), "return of `open`: expected int, got str");
        let missing = session.function_of_types("missing", None, "any").wait().unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
    }

    /// A session that answers each request for the function of signatures with an error.
    struct Untold(LocalSession, ErrorKind);

    impl RpcSession for Untold {
        fn submit(&self, request: Request) -> Submission {
            match &request.operation {
                Operation::GetFunction { name } if name == super::NAME => {
                    Submission::ready(Err(RpcError::new(self.1, "no signatures")))
                }
                _ => self.0.submit(request),
            }
        }

        fn inner(&self) -> Option<&dyn RpcSession> {
            Some(&self.0)
        }
    }

    #[test]
    fn only_an_origin_that_cannot_tell_signatures_goes_without() {
        let fetched = |kind| {
            let registry = Registry::new();
            registry.add("twice", |x: i64| 2 * x);
            let session = Session::new(Untold(LocalSession::new(registry), kind));
            session.function::<(i64,), i64>("twice").wait().and_then(|twice| twice.call((4,)).wait())
        };
        for kind in [ErrorKind::NotFound, ErrorKind::Refused, ErrorKind::Unauthenticated, ErrorKind::Unsupported] {
            assert_eq!(fetched(kind).ok(), Some(8), "{kind:?}");
        }
        for kind in [ErrorKind::DeadlineExceeded, ErrorKind::PeerLost, ErrorKind::Closed] {
            assert_eq!(fetched(kind).err().map(|error| error.kind()), Some(kind));
        }
    }

    #[test]
    fn the_kind_of_a_union_is_open() {
        let unions = ["[tensor] | tensor", "object<X> | int", "{str: any} | str", "(int, str) | null", "int | str?"];
        for open in unions.into_iter().chain(["any", "object<std::map<int", "packed<fn(u8) -> u8>"]) {
            assert_eq!(kind(open), None, "{open}");
        }
        for (name, expected) in [
            ("[int | str]", ("list", false)),
            ("{str: int | str}?", ("map", true)),
            ("object<Either<A | B>>", ("object", false)),
            ("int?", ("int", true)),
        ] {
            assert_eq!(kind(name), Some(expected), "{name}");
        }
    }

    #[test]
    fn kinds_that_are_converted_fit() {
        let arg_fits = |got: &'static str, param: &str| {
            let wanted = ClientTypes { args: Some(vec![Some(got)]), returns: None };
            wanted.check("f", &[param.to_owned()], "any").is_ok()
        };
        let return_fits = |returns: &str, expected: &'static str| {
            let wanted = ClientTypes { args: None, returns: Some(expected) };
            wanted.check("f", &[], returns).is_ok()
        };
        for (got, param) in [
            ("bool", "int"),
            ("int", "bool"),
            ("bool", "float"),
            ("int", "float"),
            ("str", "dtype"),
            ("str", "[tensor] | str"),
            ("tensor", "object<ffi.Object>"),
            ("module", "object<ffi.Object>"),
            ("function", "object<ffi.Object>?"),
            ("list", "object<ffi.Object>"),
        ] {
            assert!(arg_fits(got, param), "{got} for {param}");
        }
        for (got, param) in [
            ("float", "int"),
            ("float", "bool"),
            ("dtype", "str"),
            ("str", "int"),
            ("int", "object<Counter>"),
            ("object", "tensor"),
            ("str", "[int | str]"),
        ] {
            assert!(!arg_fits(got, param), "{got} for {param}");
        }
        assert!(return_fits("int", "float") && return_fits("object<ffi.Object>", "tensor"));
        assert!(return_fits("tensor | [tensor]", "tensor"));
        assert!(!return_fits("bool", "int") && !return_fits("object<Counter>", "int"));
    }
}
