//! Runner of the tests of a program that has a `main` of its own.
//!
//! Like the usual test program, it takes parts of the names of tests as arguments, and `--list`.

use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

/// Returns these functions with their names, for [`run`].
macro_rules! tests {
    ($($name:ident)*) => { [$((stringify!($name), $name as fn())),*] };
}
pub(crate) use tests;

/// Runs the tests that the arguments of this process choose, one after the other, or lists them.
pub(crate) fn run(tests: &[(&str, fn())]) -> ExitCode {
    let args: Vec<_> = env::args().skip(1).collect();
    let listing = args.iter().any(|arg| arg == "--list");
    let filters: Vec<_> = args.iter().filter(|arg| !arg.starts_with('-')).collect();
    let chosen = |name: &str| filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str()));
    let mut failed = 0;
    for (name, test) in tests.iter().filter(|(name, _)| chosen(name)) {
        if listing {
            println!("{name}: test");
            continue;
        }
        let outcome = catch_unwind(AssertUnwindSafe(test));
        println!("test {name} ... {}", if outcome.is_ok() { "ok" } else { "FAILED" });
        failed += u32::from(outcome.is_err());
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
