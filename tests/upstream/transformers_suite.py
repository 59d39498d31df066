"""transformers' common tests on our classes; ``test_transformers.py`` puts this file beside them and runs it.

Collected only there. The mixins are unchanged; each override below says why it is one.
"""

import json
import os
import tempfile
import unittest
from pathlib import Path

import torch
from PIL import Image
from transformers import pipeline
from transformers.models.auto import modeling_auto

from affdiv_zoo.hf import AffDivBackbone, AffDivConfig, AffDivForImageClassification, AffDivModel

from . import test_pipeline_mixin
from .test_backbone_common import BackboneTesterMixin
from .test_configuration_common import ConfigTester
from .test_modeling_common import ModelTesterMixin
from .test_pipeline_mixin import PipelineTesterMixin

# The tests look classes up by these names of transformers' own models, to know which take labels.
modeling_auto.MODEL_MAPPING_NAMES["affdiv"] = "AffDivModel"
modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES["affdiv"] = "AffDivForImageClassification"

# The pipelines' own halves of PipelineTesterMixin are not in the source distribution: these take their places.
for task, name in (("image-classification", "Classification"), ("image-feature-extraction", "FeatureExtraction")):
    test_pipeline_mixin.pipeline_test_mapping[task]["test"] = f"{__name__}.{name}PipelineHalf"


class ClassificationPipelineHalf:
    task = "image-classification"

    def get_test_pipeline(self, model, tokenizer=None, image_processor=None, dtype="float32"):
        pipe = pipeline(self.task, model=model, image_processor=image_processor, dtype=dtype)
        return pipe, [Image.new("RGB", (40, 30), color) for color in ("red", "blue", "black")]

    def run_pipeline_test(self, pipe, examples):
        for output in pipe(examples):
            assert len(output) == 5 and all(set(o) == {"label", "score"} for o in output)
            assert abs(sum(o["score"] for o in output) - 1) < 1e-2
        assert len(pipe(examples[0], top_k=1)) == 1


class FeatureExtractionPipelineHalf(ClassificationPipelineHalf):
    task = "image-feature-extraction"

    def run_pipeline_test(self, pipe, examples):
        size = pipe.model.config.num_features
        assert all(size in torch.tensor(output).shape for output in pipe(examples))


class AffDivTester:
    """A small configuration and inputs for it."""

    is_training = True
    batch_size = 3
    num_labels = 5

    def __init__(self, parent, architecture, expected, model_args):
        self.parent = parent
        self.architecture, self.model_args = architecture, model_args
        for key, value in expected.items():
            setattr(self, key, value)

    def get_config(self):
        return AffDivConfig(architecture=self.architecture, model_args=self.model_args, num_labels=self.num_labels)

    def prepare_config_and_inputs_for_common(self):
        torch.manual_seed(0)
        return self.get_config(), {"pixel_values": torch.rand(self.batch_size, 3, 32, 32)}


class CommonTests(ModelTesterMixin, PipelineTesterMixin):
    all_model_classes = (AffDivModel, AffDivForImageClassification)
    pipeline_model_mapping = {
        "image-feature-extraction": AffDivModel,
        "image-classification": AffDivForImageClassification,
    }
    test_resize_embeddings = False  # images have no vocabulary

    def setUp(self):
        self.model_tester = AffDivTester(self, self.architecture, self.expected, self.model_args)
        self.config_tester = ConfigTester(
            self,
            config_class=AffDivConfig,
            has_text_modality=False,
            common_properties=[],  # hidden_size and the like are the timm model's
            architecture=self.architecture,
            model_args=self.model_args,
        )

    def test_config(self):
        self.config_tester.run_common_tests()

    def run_task_tests(self, task, dtype="float32"):
        """The mixin asks the Hub for its tiny models, where ours are not: what it will look for is made here."""
        if task in self.pipeline_model_mapping:
            cls = self.pipeline_model_mapping[task]
            folder = Path(os.environ["TRANSFORMERS_TINY_MODEL_PATH"]) / "affdiv" / cls.__name__
            cls(self.model_tester.get_config()).save_pretrained(folder)
        super().run_task_tests(task, dtype)

    def test_hidden_states_output(self):
        """timm's hidden states are maps, (batch, channels, height, width), of transformers, too: without the first."""
        self.model_tester.seq_length, self.model_tester.hidden_size = self.model_tester.first_map
        super().test_hidden_states_output()

    def test_can_init_all_missing_weights(self):
        """The mixin's test seeds every tensor for itself, and lets TimmWrapper pass by its name, since timm draws a
        model's weights one after the other. With one seed for the whole model, ours must agree without exception."""
        for cls in self.all_model_classes:
            torch.manual_seed(1)
            expected = cls(self.model_tester.get_config())
            torch.manual_seed(1)
            model = cls.from_pretrained(None, config=self.model_tester.get_config(), state_dict={})
            tensors = dict(model.named_parameters()) | dict(model.named_buffers())
            for name, value in (dict(expected.named_parameters()) | dict(expected.named_buffers())).items():
                self.assertTrue(torch.equal(tensors.pop(name), value), name)
            self.assertFalse(tensors)

    @unittest.skip("Images have no vocabulary: as TimmWrapper, these models have no input embeddings to get or set")
    def test_model_get_set_embeddings(self):
        pass


class AffDivViTTest(CommonTests, unittest.TestCase):
    architecture = "vit_nano_patch4_32_affine"
    model_args = dict(depth=2, embed_dim=24, num_heads=2)
    expected = dict(
        num_hidden_layers=2, expected_num_hidden_layers=2, num_attention_heads=2, seq_length=64, first_map=(8, 8)
    )

    def test_retain_grad_hidden_states_attentions(self):
        """Attention maps have gradients. timm's hidden states do not: they are copies beside the way to the output."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        model = AffDivModel._from_config(config, attn_implementation="eager")
        output = model(**inputs, output_attentions=True)
        output.attentions[0].retain_grad()
        output[0].flatten()[0].backward()
        self.assertIsNotNone(output.attentions[0].grad)


class AffDivResNetTest(CommonTests, unittest.TestCase):
    architecture = "resnet20_cifar_patchnorm"
    model_args = dict(depth=8)
    expected = dict(num_hidden_layers=3, expected_num_hidden_layers=3, first_map=(32, 32))
    has_attentions = False

    @unittest.skip("The tester's rule of two layers is for transformers: a CIFAR ResNet has three stages")
    def test_num_layers_is_small(self):
        pass


class AffDivMlpTest(CommonTests, unittest.TestCase):
    architecture = "mlp_cifar_affine"
    model_args = dict(width=16, depth=2)
    expected = dict(num_hidden_layers=2, expected_num_hidden_layers=2, first_map=(1, 1))
    has_attentions = False

    @unittest.skip("The hidden states are views beside the way to the output, as maps of one pixel")
    def test_retain_grad_hidden_states_attentions(self):
        pass


class FiveStages(AffDivConfig):
    """One test wants four stages by default; the default architecture has three."""

    architecture: str = "resnet18_patchnorm"


class BackboneTests(BackboneTesterMixin):
    all_model_classes = (AffDivBackbone,)
    config_class = FiveStages

    def setUp(self):
        self.model_tester = AffDivTester(self, self.architecture, {}, self.model_args)

    def test_config(self):
        """The mixin's test wants stages called stem, stage1, ...; ours have timm's names. Else it is the same."""
        config = self.model_tester.get_config()
        names = config.stage_names
        kwargs = dict(architecture=self.architecture, model_args=self.model_args)
        self.assertEqual((config.out_features, config.out_indices), ([names[-1]], [len(names) - 1]))
        config = AffDivConfig(**kwargs, out_features=names[:2], out_indices=[0, 1])
        self.assertEqual((config.out_features, config.out_indices), (names[:2], [0, 1]))
        config = AffDivConfig(**kwargs, out_features=names[1:2])
        self.assertEqual((config.out_features, config.out_indices), (names[1:2], [1]))
        config = AffDivConfig(**kwargs, out_indices=[1])
        self.assertEqual((config.out_features, config.out_indices), (names[1:2], [1]))
        with self.assertRaises(ValueError):
            AffDivConfig(**kwargs, out_features=names[:1], out_indices=[1])
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            self.assertEqual(AffDivConfig.from_pretrained(folder).out_indices, [1])
            self.assertEqual(json.loads((Path(folder) / "config.json").read_text())["out_features"], names[1:2])


class AffDivViTBackboneTest(BackboneTests, unittest.TestCase):
    architecture, model_args = AffDivViTTest.architecture, AffDivViTTest.model_args


class AffDivResNetBackboneTest(BackboneTests, unittest.TestCase):
    architecture, model_args = AffDivResNetTest.architecture, AffDivResNetTest.model_args
    has_attentions = False
