//! A softmax classifier of handwritten digits, trained data-parallel: the functions that run on
//! workers, and the controller's part.

use std::io::Read;

use disco::{Content, DiscoError, DiscoSession, ReduceOp, Scope, WorkerId};
use flate2::read::GzDecoder;
use rpc_core::{
    DataType, Element, ErrorKind, Registry, Result, RpcError, Tensor, TensorView, TensorViewMut, Value, VirtualDevice,
};

/// The digits.
pub const CLASSES: usize = 10;
const PIXELS: usize = 64;
/// Weights for each pixel and class, and a bias for each class behind them.
const MODEL: usize = (PIXELS + 1) * CLASSES;
/// Number of images of one step, those of all workers together.
const BATCH: usize = 32;
/// Number of times that all training images are used for the promised accuracy.
pub const EPOCHS: usize = 40;
const RATE: f64 = 0.3;
const SEED: u64 = 0x5eed_0fd1_6175;

/// Images and their classes.
pub struct Digits {
    /// 64 pixels for each image, from 0 to 1.
    pub images: Vec<f32>,
    /// The digit that each one shows.
    pub classes: Vec<u8>,
}

impl Digits {
    /// Returns the data that this program carries: 1,797 images, shuffled, always in the same way.
    /// In the file the images of one writer follow each other; shuffled, training and testing have
    /// all writers.
    ///
    /// # Errors
    ///
    /// Data that is no list of images.
    pub fn load() -> std::result::Result<Self, Box<dyn std::error::Error>> {
        let packed = include_bytes!("../../../tests/data/digits.csv.gz");
        let mut text = String::new();
        GzDecoder::new(&packed[..]).read_to_string(&mut text)?;
        let mut lines: Vec<_> = text.lines().collect();
        XorShift(SEED).shuffle(&mut lines);
        let mut digits = Self { images: Vec::new(), classes: Vec::new() };
        for line in lines {
            let numbers = line.split(',').map(str::parse).collect::<std::result::Result<Vec<u8>, _>>()?;
            let [pixels @ .., class] = &numbers[..] else { return Err("an empty line".into()) };
            if pixels.len() != PIXELS || usize::from(*class) >= CLASSES {
                return Err(format!("not 64 pixels and a class: {line}").into());
            }
            digits.images.extend(pixels.iter().map(|pixel| f32::from(*pixel) / 16.0));
            digits.classes.push(*class);
        }
        Ok(digits)
    }

    /// Returns the number of images for training, the first ones. The last fifth is for testing.
    pub fn train_len(&self) -> usize {
        self.classes.len() * 4 / 5
    }
}

/// Results of the classifier on images that it was not trained on.
pub struct Score {
    /// Rows are the true classes, columns the predicted ones.
    pub confusion: [[u32; CLASSES]; CLASSES],
}

impl Score {
    /// Returns the share of images that are classified correctly.
    pub fn accuracy(&self) -> f64 {
        let right: u32 = (0..CLASSES).map(|class| self.confusion[class][class]).sum();
        f64::from(right) / f64::from(self.confusion.iter().flatten().sum::<u32>())
    }
}

/// State of a training from which it can go on, on workers that know nothing of it.
#[derive(Default)]
pub struct Checkpoint {
    /// Number of epochs that are done.
    epochs: usize,
    /// The model after them; `None` before the first.
    model: Option<Tensor>,
}

/// The workers' part: functions over tensors that lie there.
pub fn register(registry: &Registry) {
    registry.add("digits.gradient", gradient);
    registry.add("digits.step", step);
    registry.add("digits.loss", loss);
    registry.add("digits.predict", predict);
    registry.add("digits.process", || i64::from(std::process::id()));
}

/// The mean gradient over the images that `batch` names among the worker's own, in `gradient`;
/// behind it their mean loss.
fn gradient(
    images: TensorView,
    classes: TensorView,
    model: TensorView,
    mut gradient: TensorViewMut,
    batch: Vec<usize>,
) -> Result<()> {
    let (images, classes) = (rows(&images)?, classes.as_slice::<u8>()?);
    let model = parameters(model.as_slice::<f32>()?)?;
    let [gradient @ .., loss] = gradient.as_mut_slice::<f32>()? else { return Err(no_model()) };
    parameters(gradient)?;
    gradient.fill(0.0);
    *loss = 0.0;
    let share = 1.0 / batch.len().max(1) as f32;
    for &index in &batch {
        let (Some(image), Some(&class)) = (images.get(index), classes.get(index)) else {
            return Err(RpcError::invalid_argument(format!("there is no image {index}")));
        };
        let mut errors = probabilities(image, model);
        let right =
            errors.get_mut(usize::from(class)).ok_or_else(|| RpcError::invalid_argument("there is no such class"))?;
        *loss -= share * right.max(f32::MIN_POSITIVE).ln();
        *right -= 1.0;
        // The bias is the weight of a pixel that is always set.
        for (gradient, pixel) in gradient.chunks_exact_mut(CLASSES).zip(image.iter().chain([&1.0])) {
            gradient.iter_mut().zip(errors).for_each(|(gradient, error)| *gradient += share * pixel * error);
        }
    }
    Ok(())
}

/// One step down the gradient that all workers have found together, and their loss added to
/// `losses`.
fn step(mut model: TensorViewMut, gradient: TensorView, mut losses: TensorViewMut, rate: f32) -> Result<()> {
    let [gradient @ .., loss] = gradient.as_slice::<f32>()? else { return Err(no_model()) };
    let (model, losses) = (model.as_mut_slice::<f32>()?, losses.as_mut_slice::<f64>()?);
    parameters(model)?;
    model.iter_mut().zip(gradient).for_each(|(weight, gradient)| *weight -= rate * gradient);
    losses.iter_mut().for_each(|sum| *sum += f64::from(*loss));
    Ok(())
}

/// Returns the sum of losses since the last call.
fn loss(mut losses: TensorViewMut) -> Result<f64> {
    Ok(losses.as_mut_slice::<f64>()?.iter_mut().map(std::mem::take).sum())
}

/// Returns the most probable class of each image.
fn predict(images: TensorView, model: TensorView) -> Result<Tensor> {
    let model = parameters(model.as_slice::<f32>()?)?;
    let best = rows(&images)?.iter().map(|image| {
        let probabilities = probabilities(image, model);
        (0..CLASSES).max_by(|a, b| probabilities[*a].total_cmp(&probabilities[*b])).unwrap_or_default() as u8
    });
    let best: Vec<u8> = best.collect();
    Tensor::from_slice([best.len() as i64], &best)
}

fn rows(images: &TensorView) -> Result<&[[f32; PIXELS]]> {
    Ok(images.as_slice::<f32>()?.as_chunks().0)
}

fn parameters(model: &[f32]) -> Result<&[f32]> {
    if model.len() == MODEL { Ok(model) } else { Err(no_model()) }
}

fn no_model() -> RpcError {
    RpcError::invalid_argument("a model has 65 rows of 10 weights, and its gradient the loss behind them")
}

fn probabilities(image: &[f32; PIXELS], model: &[f32]) -> [f32; CLASSES] {
    let (weights, biases) = model.split_at(PIXELS * CLASSES);
    let mut scores = [0.0; CLASSES];
    scores.copy_from_slice(biases);
    for (pixel, weights) in image.iter().zip(weights.chunks_exact(CLASSES)) {
        scores.iter_mut().zip(weights).for_each(|(score, weight)| *score += pixel * weight);
    }
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for score in &mut scores {
        *score = (*score - largest).exp();
        sum += *score;
    }
    scores.map(|score| score / sum)
}

/// The controller's part: trains on the workers of `session`, each with its share of the images, on
/// `device` or else on the processor, and scores the result. `progress` is told each finished epoch
/// and its mean loss. Each epoch uses all training images once.
///
/// It goes on from a checkpoint, which is that of each finished epoch afterwards. A training that
/// goes on from there has the same result as one that was never interrupted.
///
/// # Errors
///
/// Failures on workers, or of the session; workers without such a device.
pub async fn train(
    checkpoint: &mut Checkpoint,
    session: &DiscoSession,
    digits: &Digits,
    epochs: usize,
    device: Option<VirtualDevice>,
    mut progress: impl FnMut(usize, f64),
) -> disco::Result<Score> {
    let workers = session.num_workers() as usize;
    // The remainder of an even division is left out: fewer images than there are workers.
    let share = digits.train_len() / workers;
    let images = scatter(session, &shares(&digits.images, workers, share, PIXELS)?, &device)?;
    let classes = scatter(session, &shares(&digits.classes, workers, share, 1)?, &device)?;
    let model = session.empty(&[PIXELS as i64 + 1, CLASSES as i64], DataType::F32, device.clone())?;
    if let Some(saved) = &checkpoint.model {
        session.broadcast(saved, Some(&model), Scope::World)?;
    }
    let gradient = session.empty(&[MODEL as i64 + 1], DataType::F32, device.clone())?;
    // Many devices have no numbers of 64 bits.
    let of_losses = if device.is_some() { DataType::F32 } else { DataType::F64 };
    let losses = session.empty(&[1], of_losses, device.clone())?;

    let compute_gradient = session.get_global_func("digits.gradient")?;
    let make_step = session.get_global_func("digits.step")?;
    let sum_of_losses = session.get_global_func("digits.loss")?;
    let mut order: Vec<usize> = (0..share).collect();
    let mut random = XorShift(SEED);
    for epoch in 1..=epochs {
        random.shuffle(&mut order);
        if epoch <= checkpoint.epochs {
            continue;
        }
        let batches = order.chunks((BATCH / workers).max(1));
        let count = batches.len();
        // The controller runs ahead: it waits for nothing before the end of the epoch.
        for batch in batches {
            session.room().await?;
            compute_gradient.call((&images, &classes, &model, &gradient, batch.to_vec()))?;
            session.allreduce(&gradient, Some(&gradient), ReduceOp::Avg, Scope::World)?;
            make_step.call((&model, &gradient, &losses, RATE))?;
        }
        let loss = sum_of_losses.call((&losses,))?;
        let loss = match session.debug_get_from_remote(&loss, WorkerId(0)).await? {
            Content::Value(Value::Float(loss)) => loss / count as f64,
            other => return Err(RpcError::internal(format!("expected a loss, got {other:?}")).into()),
        };
        let trained = session.copy_from_worker_0(&model).await?;
        session.sync_all().await?;
        *checkpoint = Checkpoint { epochs: epoch, model: Some(trained) };
        progress(epoch, loss);
    }
    score(session, digits, &model, &device).await
}

/// Gives each worker its part of a tensor, on the device.
fn scatter(session: &DiscoSession, tensor: &Tensor, device: &Option<VirtualDevice>) -> disco::Result<disco::DRef> {
    let part = match device {
        Some(_) => Some(session.empty(&tensor.shape()[1..], tensor.dtype(), device.clone())?),
        None => None,
    };
    session.scatter(tensor, part.as_ref(), Scope::World)
}

/// Has each worker classify its share of the test images.
async fn score(
    session: &DiscoSession,
    digits: &Digits,
    model: &disco::DRef,
    device: &Option<VirtualDevice>,
) -> disco::Result<Score> {
    let (workers, train) = (session.num_workers() as usize, digits.train_len());
    let truth = &digits.classes[train..];
    let share = truth.len().div_ceil(workers);
    let images = scatter(session, &shares(&digits.images[train * PIXELS..], workers, share, PIXELS)?, device)?;
    let predicted = session.get_global_func("digits.predict")?.call((&images, model))?;
    let predicted = session.gather_to_worker0(&predicted, None, Scope::World)?;
    session.sync_all().await?;
    let predicted = session.copy_from_worker_0(&predicted).await?;
    let view = predicted.read()?;
    let mut score = Score { confusion: Default::default() };
    // Behind the last image there is what filled up the shares.
    for (truth, predicted) in truth.iter().zip(view.as_slice::<u8>()?) {
        let column = score.confusion[usize::from(*truth)].get_mut(usize::from(*predicted));
        *column.ok_or_else(|| {
            let text = "a worker predicted a class that there is not";
            DiscoError::from(RpcError::new(ErrorKind::Application, text))
        })? += 1;
    }
    Ok(score)
}

/// The first rows as a tensor whose first dimension is that of workers: so many rows for each, with
/// zeros where there are no more.
fn shares<T: Element + Default + Clone>(rows: &[T], workers: usize, share: usize, width: usize) -> Result<Tensor> {
    let mut rows = rows[..rows.len().min(workers * share * width)].to_vec();
    rows.resize(workers * share * width, T::default());
    let shape: &[i64] = &[workers as i64, share as i64, width as i64];
    Tensor::from_slice(if width == 1 { &shape[..2] } else { shape }, &rows)
}

/// Marsaglia's xorshift generator: all runs shuffle alike.
struct XorShift(u64);

impl XorShift {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (1..items.len()).rev() {
            items.swap(end, (self.next() % (end as u64 + 1)) as usize);
        }
    }
}
