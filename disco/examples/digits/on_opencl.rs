//! The workers' functions over tensors on OpenCL devices, by kernels. Tensors of the processor go
//! to the functions of `model.rs`.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use rpc_core::function::Object;
use rpc_core::{
    Context, DataType, DeviceType, Function, LocalValue, Module, Registry, Result, RpcError, Tensor, Value,
};
use rpc_opencl::OpenClDevice;

const CLASSES: i64 = 10;
const WEIGHTS: i64 = 65 * CLASSES;

/// Adds the functions, after those of `model.rs`.
///
/// # Errors
///
/// Those are missing.
pub fn register(registry: &Registry) -> Result<()> {
    let kernels = Arc::new(Kernels::default());
    let cpu = |name| registry.get(name);
    let (gradient, step, loss, predict) =
        (cpu("digits.gradient")?, cpu("digits.step")?, cpu("digits.loss")?, cpu("digits.predict")?);
    let on = kernels.clone();
    registry.add(
        "digits.gradient",
        move |context: Context, images: Tensor, classes: Tensor, model: Tensor, to: Tensor, batch: Vec<usize>| {
            if is_on_opencl(&images) {
                return on.gradient(&context, [images, classes, model, to], &batch);
            }
            let batch = Value::List(batch.into_iter().map(|index| Value::Int(index as i64)).collect());
            context.call(&gradient, [images, classes, model, to].map(object).into_iter().chain([batch]).collect())
        },
    );
    let on = kernels.clone();
    registry.add("digits.step", move |context: Context, model: Tensor, by: Tensor, losses: Tensor, rate: f32| {
        let rate = Value::Float(rate.into());
        if !is_on_opencl(&model) {
            return context.call(&step, vec![object(model), object(by), object(losses), rate]);
        }
        let kernel = on.find(&model, "step_down")?;
        let sizes = [Value::Int(WEIGHTS + 1), Value::Null];
        context.call(&kernel, sizes.into_iter().chain([object(model), object(by), object(losses), rate]).collect())
    });
    registry.add("digits.loss", move |context: Context, losses: Tensor| {
        if !is_on_opencl(&losses) {
            return context.call(&loss, vec![object(losses)]);
        }
        // Mapped, it is behind the steps.
        let mut view = losses.write()?;
        let mut mapped = view.map_mut::<f32>()?;
        let total: f32 = mapped.iter_mut().map(std::mem::take).sum();
        mapped.end()?;
        Ok(Value::Float(total.into()))
    });
    registry.add("digits.predict", move |context: Context, images: Tensor, model: Tensor| {
        if !is_on_opencl(&images) {
            return context.call(&predict, vec![object(images), object(model)]);
        }
        let count = images.shape().first().copied().unwrap_or(0);
        let best = context.allocate(images.device(), DataType::U8, &[count])?;
        let kernel = kernels.find(&images, "predict")?;
        let args = vec![Value::Int(count), Value::Null, object(images), object(model), object(best.clone())];
        context.call(&kernel, args)?;
        Ok(object(best))
    });
    Ok(())
}

/// The kernels of each device, built when they are first used there.
#[derive(Default)]
struct Kernels(Mutex<BTreeMap<i32, Arc<dyn Module>>>);

impl Kernels {
    /// Returns a kernel for the device of a tensor.
    fn find(&self, tensor: &Tensor, name: &str) -> Result<Function> {
        let index = tensor.device().index;
        let mut built = self.0.lock();
        let module = match built.get(&index) {
            Some(module) => module.clone(),
            None => {
                let source = include_str!("kernels.cl");
                let module = rpc_opencl::module_of_source(OpenClDevice::open()?, index, "kernels.cl", source)?;
                built.entry(index).or_insert(module).clone()
            }
        };
        drop(built);
        module.function(name)
    }

    fn gradient(
        &self,
        context: &Context,
        [images, classes, model, to]: [Tensor; 4],
        batch: &[usize],
    ) -> Result<LocalValue> {
        let all = images.shape().first().copied().unwrap_or(0);
        if let Some(index) = batch.iter().find(|index| **index as i64 >= all) {
            return Err(RpcError::invalid_argument(format!("there is no image {index}")));
        }
        let (device, count) = (images.device(), batch.len() as i64);
        let places = context.allocate(device, DataType::I32, &[count])?;
        let bytes: Vec<u8> = batch.iter().flat_map(|index| (*index as i32).to_le_bytes()).collect();
        places.write()?.into_parts().1.copy_in(0, &bytes)?;
        let errors = context.allocate(device, DataType::F32, &[count, CLASSES])?;
        let losses = context.allocate(device, DataType::F32, &[count])?;
        let args = [&images, &classes, &model, &places, &errors, &losses].map(|tensor| object(tensor.clone()));
        let sizes = [Value::Int(count), Value::Null];
        context.call(&self.find(&images, "errors")?, sizes.into_iter().chain(args).collect())?;
        let kernel = self.find(&images, "gradient")?;
        let args = [Value::Int(WEIGHTS + 1), Value::Null, object(images), object(places), Value::Int(count)];
        let args = args.into_iter().chain([errors, losses, to].map(object));
        context.call(&kernel, args.collect())
    }
}

fn is_on_opencl(tensor: &Tensor) -> bool {
    tensor.device().kind == DeviceType::OPENCL
}

fn object(tensor: Tensor) -> LocalValue {
    Value::Object(Object::Tensor(tensor))
}
