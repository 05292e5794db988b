//! The example's training, on a session of this process.

// A test that panics has failed, which is what is wanted of it.
#![allow(clippy::unwrap_used)]

#[path = "../examples/digits/model.rs"]
mod model;

use rpc_core::blocking::block_on;
use rpc_core::{LocalSession, Registry, Session};

#[test]
fn training_reaches_the_promised_accuracy_and_is_repeatable() {
    let registry = Registry::new();
    model::register(&registry);
    let digits = model::Digits::load().unwrap();
    assert_eq!((digits.classes.len(), digits.images.len()), (1797, 1797 * 64));
    let train = || {
        let session = Session::new(LocalSession::new(registry.clone()));
        let mut losses = Vec::new();
        let score = block_on(model::train(&session, &digits, |_, loss| losses.push(loss))).unwrap().unwrap();
        (score, losses)
    };
    let (score, losses) = train();
    assert_eq!(losses.len(), model::EPOCHS);
    assert!(losses.last() < losses.first());
    assert_eq!(score.confusion.iter().flatten().sum::<u32>() as usize, digits.classes.len() - digits.train_len());
    assert!(score.accuracy() >= 0.93, "{}", score.accuracy());
    assert_eq!(train().1, losses);
}
