//! A server with a function of its own, and a client that calls it.

use rpc_core::{DataType, Device, Registry, TensorViewMut};
use rpc_transports::{Bind, Connector, Server};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The server: each client gets a session of its own over these functions.
    let registry = Registry::new();
    registry.add("add", |a: i64, b: i64| a + b);
    registry.add("fill", |mut tensor: TensorViewMut, value: f32| -> rpc_core::Result<()> {
        tensor.as_mut_slice::<f32>()?.fill(value);
        Ok(())
    });
    let server = Server::serving(registry);
    let address = server.listen(&"tcp://127.0.0.1:0".parse()?, &Bind::default()).await?;

    // The client: usually another program on another machine.
    let session = Connector::new().connect(&address.to_string()).await?;
    let add = session.function::<(i64, i64), i64>("add").await?;
    println!("1 + 2 = {}", add.call((1, 2)).await?);

    let tensor = session.alloc(Device::cpu(), DataType::F32, &[4]).await?;
    session.get_function("fill").await?.call::<()>((&tensor, 1.5)).await?;
    println!("{:?}", session.download::<f32>(&tensor).await?); // dropping `tensor` frees it at the server
    Ok(())
}
