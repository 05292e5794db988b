//! The operations of a [`Session`]: functions, tensors, devices, modules, and its end.

use crate::client::action::{Action, OneRequest, Options, PinnedReference, RequestPins, ScopedAction};
use crate::client::callbacks;
use crate::client::references::{RemoteFunction, RemoteModule, RemoteObject, RemoteTensor, TypedFunction};
use crate::client::session::Session;
use crate::device::DeviceAttribute;
use crate::dlpack::Device;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::Result;
use crate::function::convert::{ArgScope, FromReply, IntoArgs};
use crate::function::signature_check;
use crate::handle::Handle;
use crate::session::Operation;
use crate::value::Value;

impl Session {
    /// Looks up the function registered under `name`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`].
    pub fn get_function(&self, name: &str) -> Action<RemoteFunction> {
        self.action(Operation::GetFunction { name: name.to_owned() })
    }

    /// Looks up a function like [`get_function`](Self::get_function), with the types of its
    /// arguments and return.
    ///
    /// The types are compared with the function's signature, if the origin reports it and as far as
    /// both name plain types. The function itself checks each call in any case.
    ///
    /// # Errors
    ///
    /// As [`get_function`](Self::get_function), and [`ErrorKind::InvalidArgument`] if the types do
    /// not fit the signature.
    pub fn function<A: IntoArgs, R: FromReply>(&self, name: &str) -> Action<TypedFunction<A, R>> {
        let wanted = signature_check::ClientTypes { args: A::type_kinds(), returns: R::type_kind() };
        self.fetch_checked(name, wanted, TypedFunction::from_pin)
    }

    /// Looks up a function like [`function`](Self::function), with types that are known at run time
    /// alone, such as those of another language. They have the names that signatures have for them:
    /// `int`, `[str]`, `tensor`. Other names, optional types and unions leave a type open, and
    /// `None` leaves all arguments open.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn function_of_types(&self, name: &str, args: Option<&[String]>, returns: &str) -> Action<RemoteFunction> {
        let wanted = signature_check::ClientTypes {
            args: args.map(|args| args.iter().map(|arg| signature_check::plain_kind(arg)).collect()),
            returns: signature_check::plain_kind(returns),
        };
        self.fetch_checked(name, wanted, RemoteFunction::from_pin)
    }

    /// Looks up a function, and compares its signature with the types of its caller.
    fn fetch_checked<T>(
        &self,
        name: &str,
        wanted: signature_check::ClientTypes,
        make: fn(PinnedReference) -> Result<T>,
    ) -> Action<T> {
        let (session, name) = (self.clone(), name.to_owned());
        let fetch = async move |options: Options<'static>| {
            let function = options.apply(session.get_function(&name)).start();
            let signature = options.apply(session.get_function(signature_check::NAME)).start();
            let function = function.await?;
            let told = async {
                let signature = signature.await?;
                options.apply(signature.call::<Option<(Vec<String>, String)>>((name.as_str(),))).await
            };
            match told.await {
                Ok(Some((params, returns))) => wanted.check(&name, &params, &returns)?,
                Ok(None) => {}
                // An origin without that function, or whose policy withholds it, reports no
                // signatures. A deadline that has passed or a lost session is an error, as it is
                // for the function itself.
                Err(error) if signature_check::is_untold(&error) => {}
                Err(error) => return Err(error),
            }
            Ok(function.into_pin())
        };
        ScopedAction::steps_to_reference(fetch, make)
    }

    /// Calls `function`, like [`RemoteFunction::call`].
    pub fn call_func<R: FromReply>(&self, function: &RemoteFunction, args: impl IntoArgs) -> Action<R> {
        let mut scope = ArgScope { session: self.shared(), pins: Vec::new() };
        let operation = function
            .0
            .handle_in(self.shared())
            .and_then(|function| Ok(Operation::Call { function, args: args.into_args(&mut scope)? }));
        function.0.pin_result_into(&mut scope.pins);
        let pins = RequestPins { function: Some(function.0.pin()), others: scope.pins };
        OneRequest::new(self.shared(), operation).pinned(pins).into()
    }

    /// Copies between two tensors of the session with equal byte counts, without passing through
    /// the client.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`] if dtype or size differ, or if the two overlap.
    pub fn copy_among_remote(&self, from: &RemoteTensor, to: &RemoteTensor) -> Action<()> {
        let mut others = Vec::new();
        [from, to].iter().for_each(|tensor| tensor.0.pin_into(&mut others));
        let pins = RequestPins { function: None, others };
        let operation = from
            .reference_in(self.shared())
            .and_then(|from| Ok(Operation::Copy { from: from.into(), to: to.reference_in(self.shared())?.into() }));
        OneRequest::new(self.shared(), operation).pinned(pins).into()
    }

    /// Frees an object now, and fails if it does not exist. Dropping a reference frees as well,
    /// without an answer.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidHandle`] if the handle names nothing: twice freed, or of another
    /// session.
    pub fn free_handle(&self, handle: Handle) -> Action<()> {
        self.action(Operation::Free { handle })
    }

    /// Reads an attribute of a device; null if the device does not have it.
    pub fn attribute(&self, device: Device, attribute: DeviceAttribute) -> Action<Value> {
        self.action(Operation::Attribute { device, attribute })
    }

    /// Creates a stream of a device.
    pub fn create_stream(&self, device: Device) -> Action<RemoteObject> {
        self.action(Operation::CreateStream { device })
    }

    /// Frees a stream. Work that was issued to it still completes.
    pub fn free_stream(&self, stream: RemoteObject) -> Action<()> {
        stream.0.free_in(self.shared())
    }

    /// Makes `stream` the current one of `device` for later requests of the same lane; `None` is
    /// the default stream.
    pub fn set_stream(&self, device: Device, stream: Option<&RemoteObject>) -> Action<()> {
        self.stream_action(stream, |stream| Operation::SetStream { device, stream })
    }

    /// Waits until all work that was issued to `stream` has completed; `None` is the lane's current
    /// stream of `device`.
    pub fn stream_wait(&self, device: Device, stream: Option<&RemoteObject>) -> Action<()> {
        self.stream_action(stream, |stream| Operation::StreamWait { device, stream })
    }

    /// Lets work that is issued to the stream `to` from now on begin after the work that was issued
    /// to `from` so far, without waiting for it here. Each stream is named with its device; `None`
    /// is the lane's current stream of the device. A device that has no better way waits before it
    /// answers.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidHandle`] if one is no stream, [`ErrorKind::InvalidArgument`] if it
    /// belongs to another device, errors of the devices, and [`ErrorKind::Unsupported`] if the
    /// server is too old to know the operation.
    pub fn sync_stream_from_to(
        &self,
        from: (Device, Option<&RemoteObject>),
        to: (Device, Option<&RemoteObject>),
    ) -> Action<()> {
        let handle = |stream: Option<&RemoteObject>| stream.map(|stream| stream.0.handle_in(self.shared())).transpose();
        let operation = handle(from.1).and_then(|other| {
            let (other_device, device) = (from.0, to.0);
            Ok(Operation::StreamWaitFor { device, stream: handle(to.1)?, other_device, other })
        });
        let others = [from.1, to.1].into_iter().flatten().map(|stream| stream.0.pin()).collect();
        OneRequest::new(self.shared(), operation).pinned(RequestPins { function: None, others }).into()
    }

    /// Loads a module: a file of the session's workspace, or one that the server registered by
    /// name.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`] if there is no such file, or no loader accepts it.
    pub fn load_module(&self, path: &str) -> Action<RemoteModule> {
        self.action(Operation::LoadModule { path: path.to_owned(), loader: None })
    }

    /// Loads a module like [`load_module`](Self::load_module), with the loader of that name.
    pub fn load_module_with(&self, loader: &str, path: &str) -> Action<RemoteModule> {
        self.action(Operation::LoadModule { path: path.to_owned(), loader: Some(loader.to_owned()) })
    }

    /// Shuts the session down: requests that were admitted before complete first.
    /// [Callbacks](crate::client::callbacks) end: calls that wait for one fail.
    pub fn shutdown(&self) -> Action<()> {
        OneRequest::new(self.shared(), Ok(Operation::Shutdown)).before(callbacks::stop_all).into()
    }

    fn action<T: FromReply>(&self, operation: Operation) -> Action<T> {
        OneRequest::new(self.shared(), Ok(operation)).into()
    }

    fn stream_action(
        &self,
        stream: Option<&RemoteObject>,
        operation: impl FnOnce(Option<Handle>) -> Operation,
    ) -> Action<()> {
        let handle = stream.map(|stream| stream.0.handle_in(self.shared())).transpose();
        let pins = RequestPins { function: None, others: stream.map(|stream| stream.0.pin()).into_iter().collect() };
        OneRequest::new(self.shared(), handle.map(operation)).pinned(pins).into()
    }
}
