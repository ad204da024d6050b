"""Former names of methods keep working, with a warning that gives the current name."""

from abc import ABC, abstractmethod

import pytest

import llmcond
from llmcond.deprecation import renamed_methods


@renamed_methods(counted="count_examples")
class Task(ABC):
    """A class with an abstract method whose name has changed."""

    @abstractmethod
    def count_examples(self) -> int:
        """Return a number."""

    def describe(self) -> str:
        return f"{self.count_examples()} examples"


class CurrentTask(Task):
    def count_examples(self) -> int:
        return 2


def test_former_name_calls_current_method():
    with pytest.warns(
        DeprecationWarning, match=r"CurrentTask\.counted is now CurrentTask\.count_e"
    ):
        assert CurrentTask().counted() == 2


def test_override_by_former_name_is_used():
    with pytest.warns(DeprecationWarning, match=r"FormerTask\.counted is now"):

        class FormerTask(Task):
            def counted(self) -> int:
                return 3

    assert FormerTask().describe() == "3 examples"
    assert FormerTask().counted() == 3


def test_override_by_former_name_may_call_the_base_class():
    with pytest.warns(DeprecationWarning, match=r"FormerTask\.counted is now"):

        class FormerTask(CurrentTask):
            def counted(self) -> int:
                return super().counted() + 1

    with pytest.warns(DeprecationWarning, match=r"FormerTask\.counted is now"):
        assert FormerTask().describe() == "3 examples"


def test_class_with_both_names_keeps_both(recwarn):
    class CompatibleTask(Task):
        def count_examples(self) -> int:
            return 4

        counted = count_examples

    assert CompatibleTask().counted() == CompatibleTask().count_examples() == 4
    assert not recwarn


def test_base_class_need_not_define_the_method():
    @renamed_methods(with_others="add_external_data")
    class Base:
        pass

    class Derived(Base):
        def add_external_data(self) -> str:
            return "added"

    with pytest.warns(DeprecationWarning, match=r"Derived\.with_others is now"):
        assert Derived().with_others() == "added"
    assert not hasattr(Base, "with_others")


def test_warning_names_the_line_of_the_caller(recwarn):
    CurrentTask().counted()
    assert [warning.filename for warning in recwarn] == [__file__]


def test_former_name_of_argument_works(tmp_path):
    with pytest.warns(
        DeprecationWarning, match=r"embed\(source=\.\.\.\) is now embed\(texts="
    ) as caught:
        result = llmcond.embed(
            source=["A dog.", "A cat."], out=tmp_path / "v.npy", condition_text="the animal"
        )
    assert result.rows == 2
    with pytest.raises(TypeError, match="unexpected argument 'source'"):
        llmcond.embed(source=["A dog."], texts=["A cat."], out=tmp_path / "w.npy")
    assert [warning.filename for warning in caught] == [__file__]
