// The software of the Planner: its stack with the fields of that stack, and methods that lower memory.
const SECTION = "resources.software.";

const fields = (form) => [...form.querySelectorAll("[data-stacks]")];
const getStack = (form) => form.elements["resources.stack"].value;

/** Shows the fields that are open for the selected stack. Hidden fields are not sent. */
export function showSoftware(form) {
  const stack = getStack(form);
  for (const field of fields(form)) {
    field.hidden = !field.dataset.stacks.split(" ").includes(stack);
    if (field.dataset.values && !field.hidden) showValues(field, stack);
  }
}

/** Shows the values that the stack has, for a field whose values depend on the stack. */
function showValues(field, stack) {
  const own = field.dataset.values.split(" ").find((part) => part.startsWith(`${stack}=`));
  const values = own.slice(stack.length + 1).split(",");
  for (const input of field.querySelectorAll("input")) input.closest("label").hidden = !values.includes(input.value);
  const [usual] = field.querySelectorAll("input");
  if (field.querySelector("label[hidden] input:checked")) usual.checked = true;
}

/** The stack and its settings, as the resources of a spec have them. Settings with their default are left out. */
export function readSoftware(form) {
  const software = {};
  for (const field of fields(form)) {
    const [usual] = field.querySelectorAll("input");
    const input = field.querySelector("input:checked");
    if (field.hidden || !input || (usual.type === "radio" && input === usual)) continue;
    software[input.name.slice(SECTION.length)] = input.type === "checkbox" ? true : input.value;
  }
  return { stack: getStack(form), ...(Object.keys(software).length && { software }) };
}

/** Fills in the fields from the resources of a spec. */
export function putSoftware(form, { stack = "ours", software = {} } = {}) {
  const select = form.elements["resources.stack"];
  if ([...select.options].some((option) => option.value === stack)) select.value = stack;
  for (const field of fields(form)) {
    const [usual] = field.querySelectorAll("input");
    const value = software?.[usual.name.slice(SECTION.length)];
    if (usual.type === "checkbox") usual.checked = value === true;
    else check(form, usual.name, value ?? usual.value);
  }
  showSoftware(form);
}

function check(form, name, value) {
  const radio = form.querySelector(`[name="${CSS.escape(name)}"][value="${CSS.escape(value)}"]`);
  if (radio) radio.checked = true;
}

// --- LoRA, quantized weights, other optimizers, and offload

/** The inputs below `form`, each with its name in the spec. */
const inputs = (form) => [...form.querySelectorAll("[data-memory]")];
const WITH_LORA = ["lora_targets", "frozen_weights"];

/** The memory options of a spec. Options with their default are left out, and so is an empty section. */
export function readMemory(form) {
  const memory = {};
  const rank = form.querySelector('[data-memory="lora_rank"]').value.trim();
  for (const input of inputs(form)) {
    const name = input.dataset.memory;
    if (input.type === "checkbox") {
      if (input.checked) memory[name] = true;
    } else if (name === "lora_rank") {
      if (rank) memory[name] = /^\d+$/.test(rank) ? Number(rank) : rank;
    } else if (input.selectedIndex > 0 && (rank || !WITH_LORA.includes(name))) memory[name] = input.value;
  }
  return Object.keys(memory).length > 0 ? { memory } : {};
}

/** Fill in the memory options of a spec, and open the section if an option is set. */
export function putMemory(form, memory) {
  for (const input of inputs(form)) {
    const value = memory?.[input.dataset.memory];
    if (input.type === "checkbox") input.checked = value === true;
    else if (input.dataset.memory === "lora_rank") input.value = value ?? "";
    else input.value = value ?? input.options[0].value;
  }
  form.querySelector("[data-memory-options]").open = Object.keys(memory ?? {}).length > 0;
  showMemory(form);
}

/** Show the options of LoRA if a rank is entered. */
export function showMemory(form) {
  const isSet = form.querySelector('[data-memory="lora_rank"]').value.trim() !== "";
  for (const field of form.querySelectorAll("[data-with-lora]")) field.hidden = !isSet;
}
