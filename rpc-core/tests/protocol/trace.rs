//! Tests of trace contexts: their sources, and the functions that see them.

use std::cell::Cell;
use std::future::poll_fn;
use std::sync::Mutex;
use std::task::Poll;

use rpc_core::{Context, DataType, Device, LocalSession, Registry, RemoteFunction, Session, TraceContext, trace};

thread_local! {
    static SPAN: Cell<Option<TraceContext>> = const { Cell::new(None) };
}

fn context(number: u8) -> TraceContext {
    TraceContext::new([number; 16], [number; 8], 1).unwrap()
}

fn registry() -> Registry {
    let registry = Registry::new();
    let seen = |context: Context| context.trace().map(|trace| trace.to_string());
    registry
        .add("blocking", seen)
        .add_inline("inline", seen)
        .add_async("async", move |context: Context| async move { seen(context) });
    registry
}

fn seen(function: &RemoteFunction, trace: Option<TraceContext>) -> Option<String> {
    let call = function.call::<Option<String>>(());
    match trace {
        Some(trace) => call.trace(trace),
        None => call,
    }
    .wait()
    .unwrap()
}

/// One test for everything about the source, because it belongs to the whole process.
#[test]
fn a_request_takes_its_context_from_its_caller_or_from_the_source() {
    let session = Session::new(LocalSession::new(registry()));
    let functions = ["blocking", "inline", "async"].map(|name| session.get_function(name).wait().unwrap());
    assert!(trace::set_source(|| SPAN.get()));
    assert!(!trace::set_source(|| None));
    for function in &functions {
        assert_eq!(seen(function, None), None);
        assert_eq!(seen(function, Some(context(1))), Some(context(1).to_string()));
        SPAN.set(Some(context(2)));
        assert_eq!(seen(function, None), Some(context(2).to_string()));
        assert_eq!(seen(function, Some(context(1))), Some(context(1).to_string()));
        SPAN.set(None);
    }
    SPAN.set(Some(context(2)));
    assert_eq!(trace::current(), Some(context(2)));
    let tensor = session.alloc(Device::cpu(), DataType::U8, &[4]).wait().unwrap();
    session.copy_to_remote(&tensor, vec![1, 2, 3, 4]).wait().unwrap();
    assert_eq!(session.copy_from_remote(&tensor).wait().unwrap()[..], [1, 2, 3, 4]);
    SPAN.set(None);
}

#[test]
fn nested_calls_belong_to_the_same_span() {
    let inner = Session::new(LocalSession::new(registry()));
    let function = inner.get_function("blocking").wait().unwrap();
    let registry = Registry::new();
    let (blocking, inline, polled) = (function.clone(), function.clone(), function);
    registry.add("blocking", move || seen(&blocking, None));
    registry.add_inline("inline", move || {
        let call = inline.call::<Option<String>>(()).start();
        // Started here, and waited for where that is allowed.
        std::thread::spawn(|| rpc_core::blocking::block_on(call).unwrap().unwrap()).join().unwrap()
    });
    registry.add_async("async", move || {
        let function = polled.clone();
        async move {
            let mut yielded = false;
            poll_fn(|context| {
                context.waker().wake_by_ref();
                if std::mem::replace(&mut yielded, true) { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            function.call::<Option<String>>(()).await.unwrap()
        }
    });
    // A function that starts a thread has to name the context itself.
    let last = Mutex::new(inner.get_function("async").wait().unwrap());
    registry.add("thread", move |context: Context| {
        let function = last.lock().unwrap().clone();
        let unnamed = function.clone();
        let lost = std::thread::spawn(move || seen(&unnamed, None)).join().unwrap();
        assert_eq!(lost, None);
        std::thread::spawn(move || seen(&function, context.trace())).join().unwrap()
    });
    let session = Session::new(LocalSession::new(registry));
    for name in ["blocking", "inline", "async", "thread"] {
        let function = session.get_function(name).wait().unwrap();
        assert_eq!(seen(&function, Some(context(3))), Some(context(3).to_string()), "{name}");
        assert_eq!(seen(&function, None), None, "{name}");
    }
    assert_eq!(trace::current(), None);
}
