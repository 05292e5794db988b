//! A softmax classifier of handwritten digits: the functions that run at the server, and the client that drives them.

use std::io::Read;

use flate2::read::GzDecoder;
use rpc_core::{
    DataType, Device, ErrorKind, Pending, Registry, RemoteTensor, Result, RpcError, Session, TensorView, TensorViewMut,
};

/// The digits.
pub(crate) const CLASSES: usize = 10;
const PIXELS: usize = 64;
const BATCH: usize = 32;
/// How often all training images are used.
pub(crate) const EPOCHS: usize = 40;
const RATE: f64 = 0.3;
const SEED: u64 = 0x5eed_0fd1_6175;

/// Images and their classes.
pub(crate) struct Digits {
    /// 64 pixels for each image, from 0 to 1.
    pub(crate) images: Vec<f32>,
    pub(crate) classes: Vec<u8>,
}

impl Digits {
    /// The data that this program carries: 1,797 images, shuffled, always in the same way. In the file the images of one
    /// writer follow each other; shuffled, training and testing have all writers.
    pub(crate) fn load() -> std::result::Result<Self, Box<dyn std::error::Error>> {
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

    /// How many of the images, the first ones, are for training. The last fifth is for testing.
    pub(crate) fn train_len(&self) -> usize {
        self.classes.len() * 4 / 5
    }
}

/// What the classifier does with the images that it was not trained on.
pub(crate) struct Score {
    /// Rows are the true classes, columns the predicted ones.
    pub(crate) confusion: [[u32; CLASSES]; CLASSES],
}

impl Score {
    pub(crate) fn accuracy(&self) -> f64 {
        let right: u32 = (0..CLASSES).map(|class| self.confusion[class][class]).sum();
        f64::from(right) / f64::from(self.confusion.iter().flatten().sum::<u32>())
    }
}

/// The server's part: functions over tensors that lie there.
pub(crate) fn register(registry: &Registry) {
    registry.add("digits.train_step", train_step);
    registry.add("digits.predict", predict);
}

/// One step of gradient descent over the images that `batch` names. Returns their mean loss from before the step.
fn train_step(
    images: TensorView,
    classes: TensorView,
    mut weights: TensorViewMut,
    mut biases: TensorViewMut,
    batch: Vec<usize>,
    rate: f32,
) -> Result<f64> {
    let (images, classes) = (rows(&images)?, classes.as_slice::<u8>()?);
    let (weights, biases) = (weights.as_mut_slice::<f32>()?, biases.as_mut_slice::<f32>()?);
    check_model(weights, biases)?;
    let mut gradient = [0.0; PIXELS * CLASSES];
    let mut bias_gradient = [0.0; CLASSES];
    let mut loss = 0.0;
    for &index in &batch {
        let (Some(image), Some(&class)) = (images.get(index), classes.get(index)) else {
            return Err(RpcError::invalid_argument(format!("there is no image {index}")));
        };
        let mut errors = probabilities(image, weights, biases);
        let right =
            errors.get_mut(usize::from(class)).ok_or_else(|| RpcError::invalid_argument("there is no such class"))?;
        loss -= f64::from(right.max(f32::MIN_POSITIVE).ln());
        *right -= 1.0;
        for (gradient, pixel) in gradient.chunks_exact_mut(CLASSES).zip(image) {
            gradient.iter_mut().zip(errors).for_each(|(gradient, error)| *gradient += pixel * error);
        }
        bias_gradient.iter_mut().zip(errors).for_each(|(gradient, error)| *gradient += error);
    }
    let step = rate / batch.len().max(1) as f32;
    weights.iter_mut().zip(gradient).for_each(|(weight, gradient)| *weight -= step * gradient);
    biases.iter_mut().zip(bias_gradient).for_each(|(bias, gradient)| *bias -= step * gradient);
    Ok(loss / batch.len().max(1) as f64)
}

/// The most probable class of each image.
fn predict(images: TensorView, weights: TensorView, biases: TensorView, mut classes: TensorViewMut) -> Result<()> {
    let (images, classes) = (rows(&images)?, classes.as_mut_slice::<u8>()?);
    let (weights, biases) = (weights.as_slice::<f32>()?, biases.as_slice::<f32>()?);
    check_model(weights, biases)?;
    if images.len() != classes.len() {
        return Err(RpcError::invalid_argument("there must be as many classes as images"));
    }
    for (image, class) in images.iter().zip(classes) {
        let probabilities = probabilities(image, weights, biases);
        let best = (0..CLASSES).max_by(|a, b| probabilities[*a].total_cmp(&probabilities[*b]));
        *class = best.unwrap_or_default() as u8;
    }
    Ok(())
}

fn rows(images: &TensorView) -> Result<&[[f32; PIXELS]]> {
    Ok(images.as_slice::<f32>()?.as_chunks().0)
}

fn check_model(weights: &[f32], biases: &[f32]) -> Result<()> {
    if (weights.len(), biases.len()) == (PIXELS * CLASSES, CLASSES) {
        Ok(())
    } else {
        Err(RpcError::invalid_argument("weights must have shape [64, 10], and biases [10]"))
    }
}

fn probabilities(image: &[f32; PIXELS], weights: &[f32], biases: &[f32]) -> [f32; CLASSES] {
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

/// The client's part: trains on `session`, and scores the result. `progress` is told each finished epoch and its mean loss.
pub(crate) async fn train(session: &Session, digits: &Digits, mut progress: impl FnMut(usize, f64)) -> Result<Score> {
    let (total, train) = (digits.classes.len(), digits.train_len());
    let images = session.upload(&[total as i64, PIXELS as i64], &digits.images).await?;
    let classes = session.upload(&[total as i64], &digits.classes).await?;
    let weights = session.alloc(Device::cpu(), DataType::F32, &[PIXELS as i64, CLASSES as i64]).await?;
    let biases = session.alloc(Device::cpu(), DataType::F32, &[CLASSES as i64]).await?;

    let step = session.get_function("digits.train_step").await?;
    let mut order: Vec<usize> = (0..train).collect();
    let mut random = XorShift(SEED);
    for epoch in 1..=EPOCHS {
        random.shuffle(&mut order);
        // All steps of the epoch are sent off before the first loss is back: they run in this order, one by one.
        let steps: Vec<Pending<f64>> = order
            .chunks(BATCH)
            .map(|batch| step.call((&images, &classes, &weights, &biases, batch.to_vec(), RATE)).start())
            .collect();
        let (mut loss, count) = (0.0, steps.len());
        for step in steps {
            loss += step.await?;
        }
        progress(epoch, loss / count as f64);
    }

    // A view of the last images: nothing is copied.
    let test = (total - train) as i64;
    let offset = (train * PIXELS * size_of::<f32>()) as u64;
    let test_images = images.view(offset, DataType::F32, &[test, PIXELS as i64], None);
    let predicted: RemoteTensor = session.alloc(Device::cpu(), DataType::U8, &[test]).await?;
    let predict = session.get_function("digits.predict").await?;
    predict.call::<()>((&test_images, &weights, &biases, &predicted)).await?;

    let mut score = Score { confusion: Default::default() };
    for (truth, predicted) in digits.classes[train..].iter().zip(session.download::<u8>(&predicted).await?) {
        let column = score.confusion[usize::from(*truth)].get_mut(usize::from(predicted));
        *column.ok_or_else(|| {
            RpcError::new(ErrorKind::Application, "the server predicted a class that there is not")
        })? += 1;
    }
    Ok(score)
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
