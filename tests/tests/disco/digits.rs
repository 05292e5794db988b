//! The example `digits`: the same program over every kind of launch, with the same losses.

use rpc_core::blocking::block_on;
use rpc_tests::digits::{Checkpoint, Digits, EPOCHS, train};
use rpc_tests::spmd::{Data, Launch};

const NODE: &str = env!("CARGO_BIN_EXE_disco_node");

fn losses_and_accuracy(launch: Launch, digits: &Digits, epochs: usize) -> (Vec<f64>, f64) {
    let fixture = launch.start(4, 1);
    let mut losses = Vec::new();
    let mut start = Checkpoint::default();
    let training = train(&mut start, &fixture.session, digits, epochs, None, |_, loss| losses.push(loss));
    let score = block_on(training).unwrap().unwrap();
    fixture.session.shutdown().wait().unwrap();
    let tested = score.confusion.iter().flatten().sum::<u32>() as usize;
    assert_eq!(tested, digits.classes.len() - digits.train_len());
    (losses, score.accuracy())
}

#[test]
fn training_reaches_the_promised_accuracy() {
    let digits = Digits::load().unwrap();
    assert_eq!((digits.classes.len(), digits.images.len()), (1797, 1797 * 64));
    let (losses, accuracy) = losses_and_accuracy(Launch::Threads, &digits, EPOCHS);
    assert_eq!(losses.len(), EPOCHS);
    assert!(losses.last() < losses.first());
    assert!(accuracy >= 0.93, "{accuracy}");
}

#[test]
fn training_has_the_same_losses_over_every_launch() {
    let digits = Digits::load().unwrap();
    let (expected, accuracy) = losses_and_accuracy(Launch::Threads, &digits, 3);
    let others = [
        // A second run has exactly the same losses.
        Launch::Threads,
        Launch::Processes(NODE),
        Launch::Tcp { per_node: 2, data: Data::Shared },
        Launch::Tcp { per_node: 1, data: Data::Tcp },
        Launch::Chain,
        Launch::DialIn,
        Launch::NodeOfProcesses(NODE),
    ];
    for launch in others {
        let (losses, other) = losses_and_accuracy(launch, &digits, 3);
        // The order in which the workers' gradients are added may differ, and with it the last
        // bits.
        let close = |(a, b): (&f64, &f64)| (a - b).abs() <= a.abs() * 1e-5;
        assert!(losses.iter().zip(&expected).all(close), "{launch:?}: {losses:?} instead of {expected:?}");
        assert!((other - accuracy).abs() < 0.01, "{launch:?}: {other}");
        if launch == Launch::Threads {
            assert_eq!(losses, expected);
        }
    }
}
