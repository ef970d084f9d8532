"""What is said where a checkpoint does not carry everything."""

from __future__ import annotations

from pytest_fp8.codes import K
from pytest_fp8.questions.findings import Words

WORDS: Words = {
    K.LOAD_REFUSED: (
        "the {target} arm refuses the checkpoint of {source}",
        "load_state_dict(), or a hook of it, raises",
        "give the state dict of the one model to load_state_dict() of the other, by hand",
    ),
    K.STORED_IN_FP8: (
        "weights were stored in FP8",
        "the FP8 copies were saved in place of the master weights",
        "save the parameters, not the quantized workspaces",
    ),
    K.UNTIED: (
        "a weight that was tied is one of its own after the conversion",
        "the conversion copied weights into new layers: the model was untied",
        "tie again after the conversion: model.tie_weights()",
    ),
    K.WEIGHTS_MISSING: (
        "weights are missing from the checkpoint",
        "keys were renamed by a wrapper, or not saved",
        "compare the keys of both arms' state dicts",
    ),
    K.KEYS_WITHOUT_A_HOME: (
        "the checkpoint has keys with no home",
        "a prefix, or scaling state that no weight of the target takes",
        "compare the keys of both arms' state dicts",
    ),
    K.OTHER_SHAPE: (
        "weights have another shape",
        "fused or split layers",
        "compare the keys of both arms' state dicts",
    ),
    K.NOTHING_LOADED: (
        "the checkpoint was loaded into nothing",
        "keys carry a wrapper's prefix (_orig_mod., module.) and a load that is not strict drops them",
        "load with strict=True, and save the module inside the wrapper",
    ),
    K.WEIGHTS_CHANGED: (
        "weights changed on the way",
        "a cast on the way, or a load that silently did nothing",
        "load with strict=True",
    ),
    K.STALE_COPIES: (
        "{layers} FP8 layer(s) compute with weights of before the load",
        "the layer computes with weights of before the load: a cached FP8 copy of the weight that loading does not "
        "renew",
        "drop the copy when a state dict is loaded (register_load_state_dict_post_hook), or keep weight._version with "
        "it and make it again where that differs",
    ),
    K.OPTIMIZER_LOST: (
        "the optimizer's state did not arrive",
        "{why}",
        "save optimizer.state_dict(), and give it to optimizer.load_state_dict() before the next step",
    ),
    K.OUTPUTS_NOT_FINITE: (
        "the trained model's outputs are not finite, so nothing tells whether it arrived",
        "its training diverged before it saved",
        "ask assert_loss(), which names the arm and the step",
    ),
    K.COMPUTES_OTHERWISE: (
        "the loaded model computes something else",
        "the arms make something else of the same weights: a factor, a flag or a buffer that no checkpoint carries "
        "(neither arm keeps scaling state)",
        "give both arms' models the same weights, and compare their outputs layer by layer",
    ),
    K.DATA_NOT_CARRIED: (
        "the resumed run was given other data",
        "batch(step) or the step takes its data from something that moves on by itself (an iterator, a DataLoader, a "
        "generator that is not seeded), so that a resumed run draws another order; or loss() or the step makes other "
        "inputs of the same batch in one arm",
        "let the data depend on the step alone, or save and load the position of the data with the checkpoint",
    ),
    K.SOURCE_DIVERGED: (
        "the {arm} arm's own loss is not finite after it saved",
        "the {arm} arm's training diverges, with the checkpoint having no part in it",
        "ask assert_loss(), which says in which arm and from which step on",
    ),
    K.DOES_NOT_GO_ON: (
        "training does not go on where the source was",
        "the optimizer restarted from nothing, or what the step reads is not carried: counters, flags, what is trained",
        "check that optimizer state and step count were loaded",
    ),
}
WITH_SCALES: Words = {
    K.COMPUTES_OTHERWISE: (
        "the loaded model computes something else",
        "stale scaling state, or buffers that were not carried",
        "reset scaling state after loading",
    ),
    K.DOES_NOT_GO_ON: (
        "training does not go on where the source was",
        "the optimizer or the scaling state restarted from nothing",
        "check that optimizer state and step count were loaded",
    ),
}
"""In place of these where an arm keeps scaling state."""
OWN: Words = {
    **WORDS,
    K.CHANGED_BY_SAVING: (
        "saving changed the model itself",
        "save() casts or moves the live model (model.half(), model.to(...)) and not a copy",
        "cast the tensors of the state dict: {{name: w.to(dtype) for name, w in model.state_dict().items()}}",
    ),
    K.STRAY_PARAMETERS: (
        "after load() the optimizer steps parameters that the model does not have",
        "load() put new parameters into the model: load_state_dict(assign=True), a module replaced, or a model built "
        "anew; the optimizer still holds the old ones, so training would move nothing",
        "load in place: model.load_state_dict(state), or copy_ into each parameter",
    ),
    K.NOTHING_LOADED: (
        "load() loaded nothing",
        "keys that match no weight (a wrapper's prefix, _orig_mod. or module.), dropped by strict=False; or load() "
        "fills another model than the one that it is given",
        "load with strict=True, and load in place what the function is given",
    ),
    K.BUFFERS_NOT_CARRIED: (
        "buffers were not carried",
        "save() takes the parameters alone, and running statistics are buffers",
        "save model.state_dict() in place of model.parameters() or named_parameters()",
    ),
    K.WEIGHTS_MISSING: (
        "weights were not loaded",
        "keys that were renamed or not saved, and a load that drops them (strict=False)",
        "load with strict=True, and compare the stored keys with those of model.state_dict()",
    ),
    K.CAST_ON_THE_WAY: (
        "weights were cast to {dtype} on the way",
        "save() or load() casts to {dtype}, which holds other values than the weights' own dtype",
        "save the weights in the dtype that they have",
    ),
    K.WEIGHTS_CHANGED: (
        "weights changed on the way",
        "save() or load() changes values, or an older file was read",
        "compare model.state_dict() before save() with that after load()",
    ),
    K.SCHEDULE_LOST: (
        "the schedule is not where the source's was",
        "the schedule's state was not saved or not loaded: its next step starts from the wrong place",
        "save optimizer.scheduler.state_dict(), and give it to optimizer.scheduler.load_state_dict()",
    ),
    K.GROUPS_LOST: (
        "entries of the optimizer's parameter groups were lost",
        "the optimizer's groups hold what each step reads (lr, betas, counts), and save() or load() leaves them out",
        "save the whole optimizer.state_dict(), and give it to optimizer.load_state_dict()",
    ),
    K.ATTRIBUTES_LOST: (
        "what the optimizer keeps as attributes was lost",
        "optimizer.state_dict() holds state and groups alone: averages of weights, counters and buffers that are "
        "attributes of the object are not in it",
        "save these attributes beside optimizer.state_dict(), or keep them in optimizer.state",
    ),
    K.STATE_LEFT_BEHIND: (
        "{which}() leaves the {arm} model in another state",
        "{which}() calls model.eval(), model.train() or requires_grad_() and does not take it back: the model then "
        "computes with other dropout, or trains other weights",
        "set back at the end of {which}() what it changed, or do it on a copy of the model",
    ),
}
"""Of the user's own ``save()`` and ``load()``."""
