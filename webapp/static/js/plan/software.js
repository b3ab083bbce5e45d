// What is known of the software that time is planned for: fields shown for the stacks that leave them open.
const SECTION = "resources.software.";

const fields = (form) => [...form.querySelectorAll("[data-stacks]")];
const chosen = (form) => form.querySelector('[name="resources.stack"]:checked')?.value ?? "ours";

/** Shows what the chosen stack leaves open, and hides the rest, which is not sent. */
export function showSoftware(form) {
  const stack = chosen(form);
  for (const field of fields(form)) {
    field.hidden = !field.dataset.stacks.split(" ").includes(stack);
    if (field.dataset.values && !field.hidden) showValues(field, stack);
  }
}

/** Of a field that stacks have other values of, those that this one has. */
function showValues(field, stack) {
  const own = field.dataset.values.split(" ").find((part) => part.startsWith(`${stack}=`));
  const values = own.slice(stack.length + 1).split(",");
  for (const input of field.querySelectorAll("input")) input.closest("label").hidden = !values.includes(input.value);
  const [usual] = field.querySelectorAll("input");
  if (field.querySelector("label[hidden] input:checked")) usual.checked = true;
}

/** Of a spec's resources: the stack, and what is told of it beside what it is planned with anyway. */
export function softwareOf(form) {
  const software = {};
  for (const field of fields(form)) {
    const [usual] = field.querySelectorAll("input");
    const input = field.querySelector("input:checked");
    if (field.hidden || !input || (usual.type === "radio" && input === usual)) continue;
    software[input.name.slice(SECTION.length)] = input.type === "checkbox" ? true : input.value;
  }
  return { stack: chosen(form), ...(Object.keys(software).length && { software }) };
}

/** Fills the fields in from a spec's resources. */
export function putSoftware(form, { stack = "ours", software = {} } = {}) {
  check(form, "resources.stack", stack);
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
