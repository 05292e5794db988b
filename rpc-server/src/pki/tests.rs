//! Unit tests of certificates and tokens.

use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::{CertificateError, RootCertStore};
use tempfile::TempDir;
use x509_parser::parse_x509_certificate;

use super::*;

/// A folder with certificates for `board.lan`, `*.lab.example`, 10.0.0.5 and ::1, made now.
struct Fixture {
    folder: TempDir,
    issued: Issued,
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let issued = plan(&folder).write(SystemTime::now()).unwrap();
        Self { folder, issued }
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.folder.path().join(name)).unwrap()
    }

    fn certificate(&self, name: &str) -> CertificateDer<'static> {
        CertificateDer::from_pem_file(self.folder.path().join(name)).unwrap()
    }

    fn roots(&self) -> Arc<RootCertStore> {
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate("ca.pem")).unwrap();
        Arc::new(roots)
    }

    /// Verifies a server's certificate as a client that trusts `ca.pem`.
    fn check_server(&self, file: &str, host: &str, now: SystemTime) -> Result<(), rustls::Error> {
        let verifier = WebPkiServerVerifier::builder_with_provider(self.roots(), provider()).build().unwrap();
        let name = ServerName::try_from(host).unwrap();
        verifier.verify_server_cert(&self.certificate(file), &[], &name, &[], unix(now)).map(drop)
    }

    /// Verifies a client's certificate as a server that trusts `ca.pem`.
    fn check_client(&self, certificate: &CertificateDer<'_>, now: SystemTime) -> Result<(), rustls::Error> {
        let verifier = WebPkiClientVerifier::builder_with_provider(self.roots(), provider()).build().unwrap();
        verifier.verify_client_cert(certificate, &[], unix(now)).map(drop)
    }
}

fn plan(folder: &TempDir) -> CertificatePlan {
    let hosts = ["board.lan", "*.lab.example", "10.0.0.5", "[::1]"];
    hosts.iter().fold(CertificatePlan::new(folder.path()), |plan, host| plan.host(host.parse().unwrap()))
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn unix(time: SystemTime) -> UnixTime {
    UnixTime::since_unix_epoch(time.duration_since(SystemTime::UNIX_EPOCH).unwrap())
}

fn days(count: u64) -> Duration {
    Duration::from_secs(count * DAY)
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn a_server_is_accepted_under_its_names_and_addresses_alone() {
    let fixture = Fixture::new();
    let check = |host| fixture.check_server("server.pem", host, SystemTime::now());
    for host in ["board.lan", "BOARD.lan", "a.lab.example", "10.0.0.5", "::1"] {
        check(host).unwrap_or_else(|error| panic!("{host}: {error}"));
    }
    for host in ["other.lan", "lab.example", "a.b.lab.example", "10.0.0.6", "::2"] {
        let error = check(host).unwrap_err();
        let named = matches!(
            error,
            rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. }
            )
        );
        assert!(named, "{host}: {error:?}");
    }
}

#[test]
fn a_client_is_accepted_and_named_by_its_subject() {
    let fixture = Fixture::new();
    let certificate = fixture.certificate("client.pem");
    fixture.check_client(&certificate, SystemTime::now()).unwrap();
    let (_, parsed) = parse_x509_certificate(&certificate).unwrap();
    assert_eq!(parsed.subject().to_string(), "CN=client");
    assert_eq!(fixture.issued.client.names, ["client"]);
}

#[test]
fn certificates_are_valid_for_one_purpose_alone() {
    let fixture = Fixture::new();
    let now = SystemTime::now();
    fixture.check_client(&fixture.certificate("server.pem"), now).unwrap_err();
    fixture.check_server("client.pem", "board.lan", now).unwrap_err();
    fixture.check_client(&fixture.certificate("ca.pem"), now).unwrap_err();

    let ca = fixture.certificate("ca.pem");
    let (_, ca) = parse_x509_certificate(&ca).unwrap();
    let usage = ca.key_usage().unwrap().unwrap().value;
    assert!(ca.is_ca() && usage.key_cert_sign() && !usage.digital_signature());
    assert_eq!(ca.basic_constraints().unwrap().unwrap().value.path_len_constraint, Some(0));
    for file in ["server.pem", "client.pem"] {
        let leaf = fixture.certificate(file);
        let (_, leaf) = parse_x509_certificate(&leaf).unwrap();
        let usage = leaf.key_usage().unwrap().unwrap().value;
        assert!(!leaf.is_ca() && usage.digital_signature() && !usage.key_cert_sign(), "{file}");
    }
}

#[test]
fn certificates_are_refused_before_and_after_their_validity() {
    let fixture = Fixture::new();
    let now = SystemTime::now();
    let check = |when| {
        let client = fixture.certificate("client.pem");
        (fixture.check_server("server.pem", "board.lan", when).is_ok(), fixture.check_client(&client, when).is_ok())
    };
    for (when, accepted) in [
        // Clocks differ.
        (now - Duration::from_secs(1800), true),
        (now + days(364), true),
        (now - days(1), false),
        (now + days(366), false),
    ] {
        assert_eq!(check(when), (accepted, accepted), "{when:?}");
    }
    assert_eq!(rfc3339(fixture.issued.server.expires)[..10], rfc3339(now + days(365))[..10]);
}

#[test]
fn another_authority_is_not_trusted() {
    let (ours, theirs) = (Fixture::new(), Fixture::new());
    ours.check_client(&theirs.certificate("client.pem"), SystemTime::now()).unwrap_err();
    assert_ne!(ours.read("ca.pem"), theirs.read("ca.pem"));
}

#[test]
fn keys_belong_to_their_certificates_and_are_their_owners_alone() {
    let folder = tempfile::tempdir().unwrap();
    let deep = folder.path().join("made/if/absent");
    CertificatePlan::new(&deep).host("a.lan".parse().unwrap()).write(SystemTime::now()).unwrap();
    for name in ["ca", "server", "client"] {
        let (certificate, key) = (deep.join(format!("{name}.pem")), deep.join(format!("{name}.key")));
        assert_eq!((mode(&key), mode(&certificate) & 0o600), (0o600, 0o600));
        let chain = vec![CertificateDer::from_pem_file(&certificate).unwrap()];
        let key = PrivateKeyDer::from_pem_file(&key).unwrap();
        // Refuses a key that does not match.
        rustls::sign::CertifiedKey::from_der(chain, key, &provider()).unwrap();
    }
    assert_eq!(fs::read_dir(&deep).unwrap().count(), 6, "nothing else is left");
}

#[test]
fn a_second_run_renews_with_the_same_authority_and_the_same_keys() {
    let fixture = Fixture::new();
    let old: Vec<_> = ["ca.pem", "ca.key", "server.key", "client.key"].map(|name| (name, fixture.read(name))).into();
    let (old_server, old_client) = (fixture.read("server.pem"), fixture.read("client.pem"));
    // A reader of the group may have been let in on purpose.
    let shared = fixture.folder.path().join("server.key");
    set_permissions(&shared, Permissions::from_mode(0o640)).unwrap();

    let later = SystemTime::now() + days(300);
    let issued = CertificatePlan::new(fixture.folder.path()).write(later).unwrap();
    assert_eq!((issued.ca.made, issued.server.made, issued.client.made), (Made::Kept, Made::Renewed, Made::Renewed));
    assert_eq!(issued.server.names, fixture.issued.server.names);
    for (name, contents) in old {
        assert!(fixture.read(name) == contents, "{name}");
    }
    assert_eq!(mode(&shared), 0o640);
    assert!(fixture.read("server.pem") != old_server && fixture.read("client.pem") != old_client);
    let after_the_first = SystemTime::now() + days(400);
    fixture.check_server("server.pem", "10.0.0.5", after_the_first).unwrap();
    fixture.check_client(&fixture.certificate("client.pem"), after_the_first).unwrap();

    let (old, new) =
        (CertificateDer::from_pem_slice(old_server.as_bytes()).unwrap(), fixture.certificate("server.pem"));
    let serial = |der| parse_x509_certificate(der).unwrap().1.raw_serial().to_vec();
    assert_ne!(serial(&old), serial(&new), "a serial number is used once");
}

#[test]
fn a_renewal_may_change_names_and_a_new_client_gets_a_new_key() {
    let fixture = Fixture::new();
    let (server_key, client_key) = (fixture.read("server.key"), fixture.read("client.key"));
    let plan = CertificatePlan::new(fixture.folder.path());
    let change = plan.clone().host("new.lan".parse().unwrap()).client_name("bob.lab".parse().unwrap());
    let issued = change.write(SystemTime::now()).unwrap();
    assert_eq!((issued.server.names, issued.client.names), (vec!["new.lan".to_owned()], vec!["bob.lab".to_owned()]));
    fixture.check_server("server.pem", "new.lan", SystemTime::now()).unwrap();
    fixture.check_server("server.pem", "board.lan", SystemTime::now()).unwrap_err();
    assert!(fixture.read("server.key") == server_key && fixture.read("client.key") != client_key);
    // And bob remains bob.
    assert_eq!(plan.write(SystemTime::now()).unwrap().client.names, ["bob.lab"]);
}

#[test]
fn force_makes_a_new_authority_and_new_keys() {
    let fixture = Fixture::new();
    let (old_client, old_key) = (fixture.certificate("client.pem"), fixture.read("client.key"));
    let issued = plan(&fixture.folder).force(true).write(SystemTime::now()).unwrap();
    assert_eq!((issued.ca.made, issued.client.made), (Made::Created, Made::Created));
    fixture.check_client(&old_client, SystemTime::now()).unwrap_err();
    fixture.check_client(&fixture.certificate("client.pem"), SystemTime::now()).unwrap();
    assert_ne!(fixture.read("client.key"), old_key);
    assert_eq!(mode(&fixture.folder.path().join("ca.key")), 0o600);
}

#[test]
fn leaves_expire_with_their_authority_at_the_latest_and_an_expired_authority_signs_none() {
    let fixture = Fixture::new();
    let plan = CertificatePlan::new(fixture.folder.path());
    let issued = plan.write(SystemTime::now() + days(3600)).unwrap();
    assert_eq!(issued.server.expires, issued.ca.expires);
    let error = plan.write(SystemTime::now() + days(3653)).unwrap_err();
    assert!(matches!(error, PkiError::AuthorityExpired { .. }) && error.to_string().contains("--force"), "{error}");
}

#[test]
fn existing_files_are_not_overwritten_by_accident() {
    let refused = |prepare: &dyn Fn(&Fixture)| {
        let fixture = Fixture::new();
        prepare(&fixture);
        let files = || {
            let mut files: Vec<_> = fs::read_dir(&fixture.folder)
                .unwrap()
                .map(|entry| entry.unwrap().path())
                .map(|path| (path.clone(), fs::read(path).unwrap()))
                .collect();
            files.sort();
            files
        };
        let before = files();
        let error = plan(&fixture.folder).write(SystemTime::now()).unwrap_err();
        assert!(files() == before, "{error}");
        assert!(error.to_string().contains("--force"), "{error}");
        plan(&fixture.folder).force(true).write(SystemTime::now()).unwrap();
        fixture.check_client(&fixture.certificate("client.pem"), SystemTime::now()).unwrap();
        error
    };
    let remove =
        |name: &'static str| move |fixture: &Fixture| fs::remove_file(fixture.folder.path().join(name)).unwrap();
    let put = |name: &'static str, text: &'static str| {
        move |fixture: &Fixture| fs::write(fixture.folder.path().join(name), text).unwrap()
    };
    let swap = |name: &'static str| {
        move |fixture: &Fixture| fs::write(fixture.folder.path().join(name), Fixture::new().read(name)).unwrap()
    };
    assert!(matches!(refused(&remove("ca.key")), PkiError::HalfAuthority { .. }));
    assert!(matches!(refused(&remove("ca.pem")), PkiError::HalfAuthority { .. }));
    assert!(matches!(refused(&put("ca.pem", "no certificate")), PkiError::NotACertificate { .. }));
    assert!(matches!(refused(&put("ca.key", "no key")), PkiError::NotAKey { .. }));
    assert!(matches!(refused(&put("server.pem", "no certificate")), PkiError::NotACertificate { .. }));
    assert!(matches!(refused(&swap("ca.key")), PkiError::Mismatch { .. }));
    assert!(matches!(refused(&swap("server.pem")), PkiError::Foreign { .. }));
    let leaf_as_ca = |fixture: &Fixture| {
        for end in ["pem", "key"] {
            let leaf = fixture.read(&format!("client.{end}"));
            fs::write(fixture.folder.path().join(format!("ca.{end}")), leaf).unwrap();
        }
    };
    assert!(matches!(refused(&leaf_as_ca), PkiError::NotAnAuthority { .. }));
    let no_authority = |fixture: &Fixture| {
        remove("ca.pem")(fixture);
        remove("ca.key")(fixture);
    };
    assert!(matches!(refused(&no_authority), PkiError::Foreign { .. }));
}

#[test]
fn an_interrupted_run_is_completed_by_the_next() {
    let fixture = Fixture::new();
    fs::remove_file(fixture.folder.path().join("client.pem")).unwrap();
    fs::write(fixture.folder.path().join("server.key"), KeyPair::generate().unwrap().serialize_pem()).unwrap();
    let issued = plan(&fixture.folder).write(SystemTime::now()).unwrap();
    assert_eq!((issued.server.made, issued.client.made), (Made::Renewed, Made::Created));
    for name in ["server", "client"] {
        let chain = vec![fixture.certificate(&format!("{name}.pem"))];
        let key = PrivateKeyDer::from_pem_file(fixture.folder.path().join(format!("{name}.key"))).unwrap();
        rustls::sign::CertifiedKey::from_der(chain, key, &provider()).unwrap();
    }
}

#[test]
fn a_server_without_a_name_cannot_be_certified() {
    let folder = tempfile::tempdir().unwrap();
    let error = CertificatePlan::new(folder.path()).write(SystemTime::now()).unwrap_err();
    assert!(matches!(error, PkiError::NoHost), "{error}");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
}

#[test]
fn malformed_hosts_and_client_names_are_refused() {
    let long = "a".repeat(64);
    for bad in
        ["", "two words", "tcp://a", "a:9090", "-a", "a..b", "*", "a.*.b", "münchen.de", "10.0.0.300", "[::1]:1", &long]
    {
        assert!(bad.parse::<Host>().is_err(), "{bad}");
    }
    assert_eq!("Board.LAN".parse::<Host>().unwrap().to_string(), "board.lan");
    assert_eq!("2001:DB8::1".parse::<Host>().unwrap().to_string(), "2001:db8::1");
    for bad in ["", "..", "anonymous", "two words", "a\nb", "a/b", "ä", &"a".repeat(65)] {
        assert!(bad.parse::<ClientName>().is_err(), "{bad}");
    }
}

#[test]
fn a_server_may_have_a_long_name() {
    let fixture = Fixture::new();
    let host = format!("{0}.{0}.{0}", "a".repeat(60));
    let plan = CertificatePlan::new(fixture.folder.path()).host(host.parse().unwrap());
    plan.write(SystemTime::now()).unwrap();
    fixture.check_server("server.pem", &host, SystemTime::now()).unwrap();
}

#[test]
fn times_are_formatted_to_the_second_and_far_ones_do_not_panic() {
    let at = |seconds| rfc3339(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
    assert_eq!(at(0), "1970-01-01T00:00:00Z");
    assert_eq!(at(951_827_696), "2000-02-29T12:34:56Z");
    assert_eq!(at(1_735_689_599), "2024-12-31T23:59:59Z");
    assert_eq!(at(1 << 62), "");
}
