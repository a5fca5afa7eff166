//! Every package that we build with has a licence that `deny.toml` allows.

use std::process::Command;

/// The `allow` list of deny.toml: one quoted name a line.
fn allowed() -> Vec<&'static str> {
    let (_, list) = include_str!("../../deny.toml").split_once("allow = [").expect("a list");
    let (list, _) = list.split_once(']').expect("the end of the list");
    list.split('"').skip(1).step_by(2).collect()
}

/// Whether an SPDX expression without nested parentheses leaves a choice that is
/// allowed: one of each `OR`, all of `AND`. Old manifests write `/` for `OR`.
fn is_allowed(expression: &str, allowed: &[&str]) -> bool {
    expression.split(" AND ").all(|choice| {
        let choice = choice.trim_matches(['(', ')']).replace('/', " OR ");
        choice.split(" OR ").any(|licence| allowed.contains(&licence.trim()))
    })
}

#[test]
fn expressions_are_read_as_spdx_means_them() {
    let allowed = ["MIT", "Zlib"];
    for good in ["MIT", "GPL-2.0 OR MIT", "Apache-2.0/MIT", "(GPL-2.0 OR MIT) AND Zlib"] {
        assert!(is_allowed(good, &allowed), "{good}");
    }
    for bad in ["GPL-2.0", "MIT AND GPL-2.0", "(MIT OR Zlib) AND GPL-2.0", ""] {
        assert!(!is_allowed(bad, &allowed), "{bad}");
    }
}

#[test]
fn every_licence_is_allowed() {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--offline", "--format-version", "1", "--manifest-path"]);
    let output = cargo.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).output();
    let output = output.expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    assert!(packages.len() > 50, "{}", packages.len());
    let allowed = allowed();
    let refused: Vec<_> = packages
        .iter()
        .filter(|package| !is_allowed(package["license"].as_str().unwrap_or(""), &allowed))
        .map(|package| format!("{}: {}", package["name"], package["license"]))
        .collect();
    assert!(refused.is_empty(), "{refused:#?}");
}
